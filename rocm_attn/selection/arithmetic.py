"""arithmetic_id: an id of the arithmetic of deterministic attention. Equal ids mean bitwise equal results.

A rollout and its trainer, or two servers, compare their ids: if these are equal, both compute a token's attention with
the same bits from the same q, K and V. The id covers everything that decides the order of sums and the instructions:
the sources of the kernels, the compilers, the arch, and for each kind of layer its problem and its kernels with their
tiles and segments. It leaves out the sizes of pages, pools, batches and graphs, which change no bit in deterministic
mode (docs/deterministic.md). Unequal ids may still mean equal bits.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch

import rocm_attn.kernels
import rocm_attn.providers
from rocm_attn.errors import Unsupported
from rocm_attn.guards.registry import Guards
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import SMALLEST_POOL
from rocm_attn.providers.select import Selection

_BYTES = 16
# Fields of a problem that change no bit: how tokens lie in pages, and what a step may bring or ask for.
_WITHOUT_BITS = frozenset({"page_size", "custom_mask", "wants_lse"})


def arithmetic_id(selections: Sequence[Selection], guards: Guards) -> str:
    """Returns an id of attention by these kernels, 32 hexadecimal digits. Equal ids mean bitwise equal attention.

    It does not cover a model's work outside of attention: matrix products with weights, and sums over ranks.

    selections: those of a runtime, or of ExternalAttention.kernels()
    guards:     of the same

    Raises Unsupported if results may depend on the batch: without deterministic mode, with a safeguard switched off,
    and for sparse attention.
    """
    if not all(selection.deterministic for selection in selections):
        raise Unsupported(
            "the kernels give a sequence other bits in other batches, so their arithmetic has no id; build with "
            "deterministic=True"
        )
    if any(selection.sparse is not None for selection in selections):
        raise Unsupported("layers that select keys have no id of their arithmetic yet; compare their tokens")
    if guards != Guards():
        raise Unsupported("a safeguard is switched off or replaced, so the arithmetic has no id; use all of them")
    words = ["1", code_digest(), *_software(selections[0].target), *map(_words, selections)]
    return blake2b("\n".join(words).encode(), digest_size=_BYTES).hexdigest()


def _words(selection: Selection) -> str:
    """A kind of layer: its problem, and the kernels of each kind of step as they are bound for the smallest pool."""
    problem, target = selection.problem, selection.target
    kernels = []
    for kind, kernel in sorted(selection.kernels.items(), key=lambda item: item[0].value):
        bound = kernel.entry.bind(problem, target, SMALLEST_POOL).describe()
        kernels.append(f"{kind.value}: {kernel.entry.name} {bound.replace(str(problem), '')}")
    return "\n".join([_problem_words(problem), *kernels])


def _problem_words(problem: Problem) -> str:
    fields = [name for name in problem.__dataclass_fields__ if name not in _WITHOUT_BITS]
    return " ".join(f"{name}={getattr(problem, name)!r}" for name in fields)


def _software(target: Target) -> list[str]:
    """The compilers, and on a CPU what torch's own sums depend on."""
    words = [target.arch, str(target.releases.triton), str(target.releases.rocm), str(torch.__version__)]
    if target.arch in ("cpu", "interpreter"):
        words += [torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    return words


def sources() -> list[Path]:
    """The files of the kernels and of their tiles, and of what binds them to problems, in order."""
    folders = [Path(folder) for package in (rocm_attn.kernels, rocm_attn.providers) for folder in package.__path__]
    return [file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in (".py", ".json")]


@cache
def code_digest() -> str:
    """Returns a digest of sources(), 32 hexadecimal digits."""
    digest = blake2b(digest_size=_BYTES)
    for file in sources():
        text = file.read_bytes()
        digest.update(f"{file.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()
