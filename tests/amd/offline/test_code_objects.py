"""The figures read from a disassembled kernel: the loop with most products, and its use of each unit."""

from __future__ import annotations

import pytest

from tests.amd.offline.code_objects import hot_loop_of

# Addresses and words as llvm-objdump prints them: the last branch goes back to 0x100, the one before it to 0x118.
DISASSEMBLY = """\
\ts_mov_b32 s0, 0                                            // 0000000000FC: BE800080
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], 0      // 000000000100: D3E08000 02020500
\tv_exp_f32_e32 v1, v2                                       // 000000000108: 7E024102
\tv_add_f32_e32 v1, v2, v3                                   // 00000000010C: 02020702
\ts_branch label_0040                                        // 000000000110: BF82FFFB
\tv_add_f32_e32 v1, v2, v3                                   // 000000000114: 02020702
\tv_add_f32_e32 v1, v2, v3                                   // 000000000118: 02020702
\ts_cbranch_scc1 label_0046                                  // 00000000011C: BF85FFFE
"""


@pytest.mark.parametrize(("arch", "matrix"), [("gfx942", 8), ("gfx950", 4)])
def test_the_loop_with_most_products_is_read(arch: str, matrix: int) -> None:
    loop = hot_loop_of(DISASSEMBLY, arch)
    assert (loop.matrix, loop.vector) == (matrix, 5), "exp2 takes four cycles, an addition one"


def test_a_code_object_without_a_loop_is_an_error() -> None:
    with pytest.raises(ValueError, match="no loop"):
        hot_loop_of(DISASSEMBLY.splitlines()[0], "gfx942")
