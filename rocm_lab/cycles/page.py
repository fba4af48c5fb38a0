"""Writes the count of a published kernel into a page, next to its measured clocks, or the traffic of AITER's assembly.

    python -m rocm_lab.cycles.page docs/cycles.md fav4 fav4.amdgcn
    python -m rocm_lab.cycles.page docs/cycles.md hipkittens attn_fwd_non_causal.o
    python -m rocm_lab.cycles.page docs/cycles.md aiter aiter/hsa

The page has tables between two marks. The line of the same name is written anew; the names are those of PUBLISHED and
of PEERS. The table of AITER's decodes is written whole; the files are those of DECODES, which one commit of AITER has.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from rocm_attn.errors import BadSetting
from rocm_lab.cycles.count import LoopCount, count_loop
from rocm_lab.cycles.traffic import LoopTraffic, loop_traffic
from rocm_lab.page_parts import rows_of, with_rows
from rocm_lab.simulator.assembly import Assembly
from rocm_lab.waits.objects import files_of, kernels_of

_NOTES = "kernels/attention/note.md"


@dataclass(frozen=True, slots=True)
class Published:
    """One measured loop. name: of the page's line; what: how it differs from the others; source: where it is written"""

    name: str
    what: str
    clocks: int
    source: str


# Clocks on an MI355X of the kernel "flash attention forward, rotated, four clusters" of ROCm/gfx950-gluon-tutorials:
# heads of 128, 16-bit, no mask, 16,320 tokens, 256 rows of q and 64 keys, 8 waves. An iteration takes two key blocks of
# two waves of a SIMD: 4,096 clocks of products. Instruction traces measured them (docs/mfma_efficiency.md there).
PUBLISHED = (
    Published("fav3", "no declared order", 6282, f"{_NOTES} 1.1, baseline"),
    Published("fav3-3", "3 vector instructions declared after each product", 5768, f"{_NOTES} 1.1, K=3"),
    Published("fav3-8", "8 of them, nothing packed", 5451, f"{_NOTES} 1.1, scalarize + uniform K=8"),
    Published("fav3-split", "products with vector, then with exp2", 5390, f"{_NOTES} 1.1, VALU/TRANS split"),
    Published("fav4-plain", "lazy rescale, no declared order", 5394, f"{_NOTES} 3.1, no llir scheduler"),
    Published("fav4-no-pause", "declared order, scale folded into q", 4423, f"{_NOTES} 3.1, opt5"),
    Published("fav4", "and a pause before the loads of LDS", 4373, "kernels/attention/README.md 8"),
    Published("fav4-scale", "the same, scale in the loop", 4438, "kernels/attention/README.md 8"),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """A kernel with a measured throughput.

    name:      of the page's line
    what:      heads and mask
    tflops:    on an MI355X, of bfloat16 with 64 query heads, 8 of K and V, 16 sequences of 8,192 tokens
    has_lines: true for heads of 128 without a mask, as the kernels of LINES have
    """

    name: str
    what: str
    tflops: float
    has_lines: bool = False


# analysis/attn/fwd/benchmark/mi355x_*gqa_*_fwd.json of HazyResearch/HipKittens at f09e9685: "tflops", and AITER's in
# the same run, "tflops_ref".
PEERS = (
    Peer("hipkittens", "128", 1297.8, has_lines=True),
    Peer("hipkittens-causal", "128, causal", 1215.5),
    Peer("hipkittens-64", "64", 960.9),
    Peer("hipkittens-64-causal", "64, causal", 890.3),
    Peer("aiter-extend", "128", 1281.3, has_lines=True),
    Peer("aiter-extend-causal", "128, causal", 1204.7),
)
# 256 CUs of 4,096 operations a clock at 2.4 GHz.
_PEAK_TFLOPS = 2516.6


@dataclass(frozen=True, slots=True)
class Line:
    """A measured throughput with the loop's share, in per cent, and by how much a point of share moves it."""

    share: float
    tflops: float
    slope: float

    def share_at(self, tflops: float) -> float:
        """The share at another throughput, as a fraction."""
        return (self.share + (tflops - self.tflops) / self.slope) / 100


# fav4 and FlyDSL as shipped, in bfloat16 at 32 sequences of 8,192 tokens (note.md 3.25.8, 3.28.1).
LINES = (Line(94.6, 1324.7, 4.65), Line(82.9, 1313.6, 5.88))


# Decodes of one token over pages of 16 tokens, and of 1,024 in the last one, as asm_pa.csv of each arch lists them; and
# those of latents, as mla_asm.csv does, for 16, 32, 64 and 128 rows of q.
_DECODES = (
    "pa/pa_bf16_noquant_gqa8_1tg_4w",
    "pa/pa_bf16_noquant_gqa16_1tg_4w",
    "pa/pa_fp16_noquant_gqa8_1tg_4w",
    "pa/pa_fp16_noquant_gqa16_1tg_4w",
    "pa/pa_bf16_pertokenFp8_gqa8_2tg_4w",
    "pa/pa_bf16_pertokenFp8_gqa16_2tg_4w",
    "pa/pa_bf16_pertokenFp8_gqa16_1tg_4w_qlen16_msk1_ps",
    "mla/mla_dec_stage1_bf16_a16w16_subQ16_mqa16",
    "mla/mla_a16w16_qh16_m16x4_n16x1_coex0_mask1",
    "mla/mla_dec_stage1_bf16_a16w16_subQ128_mqa128",
    "mla/mla_a8w8_qh64_qseqlen4_gqaratio16",
    "mla/mla_a8w8_qh128_m32x4_n16x2_msk1",
)
# Those that load K and V by words. A block's page number, one load of 37, counts as K there.
BY_WORDS = ("mla/mla_a8w8_qh16_qseqlen1_gqaratio16", "mla/mla_a8w8_qh16_qseqlen2_gqaratio16")
DECODES = {
    "gfx942": (
        *_DECODES,
        "mla/mla_a8w8_qh64_qseqlen4_gqaratio16_ps",
        "mla/mla_a8w8_qh64_qseqlen1_gqaratio64_v3_ps",
        *BY_WORDS,
    ),
    "gfx950": (
        *_DECODES,
        "mla/MLA_A16W16_1TG_4W_16mx4_32nx1_Coex0_Msk1_QH16",
        "mla/mla_a16w16_qh64_qseqlen1_gqaratio64_v3",
        "mla/mla_a8w8_qh16_qseqlen1_gqaratio16_ps",
        "mla/mla_a8w8_qh16_qseqlen4_gqaratio16_v3_ps",
    ),
}
TRAFFIC = "instructions | matrix | waits | barriers | LDS bytes | KiB in flight of a wave | waves | of a SIMD"
_REGISTERS, _REGISTERS_AT_ONCE = 512, 8
_REGISTER = re.compile(r"\b([va])\[?(?:\d+:)?(\d+)\b")

# Eight waves of one program: two on each SIMD.
_WAVES = 2
_HASH_CHARACTERS = 12


def published_line(published: Published, count: LoopCount, sha256: str) -> str:
    """The line of a published loop: by how much the count is wrong, and both shares of the ceiling."""
    wrong = count.clocks / published.clocks - 1
    cells = [
        f"`{published.name}`",
        f"{published.what} ({published.source})",
        f"{published.clocks:,}",
        f"{count.clocks:,.0f}",
        f"{wrong:+.1%}",
        f"{count.matrix / published.clocks:.1%}",
        f"{count.share:.1%}",
        sha256[:_HASH_CHARACTERS],
    ]
    return f"| {' | '.join(cells)} |\n"


def peer_line(peer: Peer, count: LoopCount, sha256: str) -> str:
    """The line of a peer: the shares that its throughput has on both lines, and by how much the count is off each."""
    shares = [line.share_at(peer.tflops) for line in LINES] if peer.has_lines else []
    cells = [
        f"`{peer.name}`",
        peer.what,
        f"{peer.tflops:,.0f}",
        f"{peer.tflops / _PEAK_TFLOPS:.1%}",
        " or ".join(f"{share:.1%}" for share in shares),
        f"{count.share:.1%}",
        " or ".join(f"{count.share / share - 1:+.1%}" for share in shares),
        sha256[:_HASH_CHARACTERS],
    ]
    return f"| {' | '.join(cells)} |\n"


def with_line(page: str, name: str, path: Path) -> str:
    """The page with the count of a file's one kernel in the line of that name. Raises BadSetting for another name."""
    published = {each.name: each for each in (*PUBLISHED, *PEERS)}
    if name not in published:
        raise BadSetting(f"{name!r} is not published; known are {', '.join(published)}")
    (kernel,) = kernels_of(path)
    count = count_loop(kernel.assembly, kernel.arch, _WAVES, _WAVES)
    if count is None:
        raise BadSetting(f"{path} has no loop with matrix instructions")
    of_name = published[name]
    if isinstance(of_name, Published):
        part, written = "published", published_line(of_name, count, kernel.sha256)
    else:
        part, written = "peers", peer_line(of_name, count, kernel.sha256)
    lines = {line.split("`")[1]: line for line in rows_of(page, part)} | {name: written}
    return with_rows(page, part, [lines[each] for each in published if each in lines])


def traffic_cells(traffic: LoopTraffic, waves: int) -> str:
    """The cells of TRAFFIC: numbers of a KiB of K and V, and KiB in flight. waves: those that a SIMD has room for"""
    numbers = (traffic.instructions, traffic.matrix, traffic.waits, traffic.barriers)
    each = [f"{traffic.of_kib(number):.2f}" for number in numbers]
    flight = traffic.in_flight / 1024
    return " | ".join(
        [*each, f"{traffic.of_kib(traffic.lds_bytes):.0f}", f"{flight:.0f}", f"{waves}", f"{waves * flight:.0f}"]
    )


def waves_of_registers(assembly: Assembly) -> int:
    """Waves of a SIMD for which there are registers, by the highest ones that instructions name; at most 8."""
    highest = {"v": 0, "a": -1}
    for each in assembly.instructions:
        # A branch names a place, and a744 is one.
        names = [] if "branch" in each.name else _REGISTER.findall(each.text)
        for kind, number in names:
            highest[kind] = max(highest[kind], int(number))
    rounded = (-(-(highest[kind] + 1) // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE for kind in "va")
    return min(8, _REGISTERS // sum(rounded))


def with_aiter(page: str, hsa: Path) -> str:
    """The page with the traffic of the files of DECODES in AITER's folder hsa. Raises BadSetting if one is missing."""
    lines = []
    for arch, names in DECODES.items():
        for name in names:
            (kernel,) = kernels_of(next(iter(files_of([hsa / arch / f"{name}.co"]))))
            traffic = loop_traffic(kernel.assembly, narrowest=4 if name in BY_WORDS else 8)
            assert traffic is not None
            cells = traffic_cells(traffic, waves_of_registers(kernel.assembly))
            lines.append(f"| `{arch}/{name}.co` | {cells} | {kernel.sha256[:_HASH_CHARACTERS]} |\n")
    return with_rows(page, "aiter", lines)


if __name__ == "__main__":
    document, of_name, file = sys.argv[1:]
    written = Path(document).read_text()
    Path(document).write_text(
        with_aiter(written, Path(file)) if of_name == "aiter" else with_line(written, of_name, Path(file))
    )
