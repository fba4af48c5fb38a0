"""Writes the traffic of AITER's decodes into a page: python -m rocm_lab.cycles.page docs/cycles.md ../aiter/hsa

The page has the table between two marks; it is written whole. The files are those of DECODES, which one commit of AITER
has.
"""

import re
import sys
from pathlib import Path

from rocm_lab.cycles.traffic import LoopTraffic, loop_traffic
from rocm_lab.page_parts import with_rows
from rocm_lab.simulator.assembly import Assembly
from rocm_lab.waits.objects import files_of, kernels_of

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

_HASH_CHARACTERS = 12


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
    document = Path(sys.argv[1])
    document.write_text(with_aiter(document.read_text(), Path(sys.argv[2])))
