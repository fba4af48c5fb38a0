"""Texts in AITER's files that came with a fix, for builds whose version does not tell whether they have it.

A build of development between two releases, and one without a version, has a fix if its files hold the fix's mark. A
fix in compiled code has no mark, so such a build counts as one without it.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mark:
    """A text that a fix added. file: below the folder of the package `aiter`"""

    file: str
    text: str


NO_MARK = Mark("", "")
# Each is in the files of the tag that it is named with and of every later one up to v0.1.20.post1, and in none before.
# v0.1.17, 6d0304e8ce (aiter#3966)
FLOAT16_IN_SPLITS = Mark("ops/triton/attention/unified_attention.py", "kv_cache_dtype only supports F16 (")
# v0.1.19.post1, aa6ee6102a (aiter#4044)
SMALL_TILES_AT_512 = Mark("ops/triton/attention/unified_attention.py", "if head_size >= 512 and not arch.is_rdna:")
# v0.1.20, a43694f180 (aiter#4473)
LARGE_KEYS_BY_OTHERS = Mark("ops/mha.py", "def _fmha_kv_byte_extent_ge_u32(")
# 222170e1f9 (aiter#4847), 16 commits after v0.1.20 and in none of its tags
OPUS_BY_TORCH = Mark("ops/mha.py", "    gen_fake=gen_fmha_fwd_bf16_opus_fwd_fake,\n)")

MARKS = (FLOAT16_IN_SPLITS, SMALL_TILES_AT_512, LARGE_KEYS_BY_OTHERS, OPUS_BY_TORCH)


def marks_in(folder: Path) -> frozenset[Mark]:
    """The marks in the files of a folder `aiter`."""
    files = {name: folder / name for name in {mark.file for mark in MARKS}}
    texts = {name: path.read_text(errors="replace") if path.is_file() else "" for name, path in files.items()}
    return frozenset(mark for mark in MARKS if mark.text in texts[mark.file])


def installed_marks() -> frozenset[Mark]:
    """The marks of the AITER that Python would import. It is not imported, because that compiles code."""
    try:
        spec = importlib.util.find_spec("aiter")
    except ValueError:  # a module that names no file of its own
        return frozenset()
    folders = () if spec is None else spec.submodule_search_locations or ()
    return frozenset().union(*(marks_in(Path(folder)) for folder in folders))
