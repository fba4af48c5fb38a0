"""The check of barriers' memory detects its faults, in PTX made by hand."""

import pytest

from tests.amd.offline.barriers import misused_barriers

# Barriers at 64 and at 72.
BARRIERS = """
    mov.b32     %r10, global_smem;
    add.s32     %r11, %r10, 64;
    add.s32     %r12, %r11, 8;
    @%p1 mbarrier.init.shared::cta.b64 [%r11], 1;
    @%p1 mbarrier.init.shared::cta.b64 [%r12], 2;
    add.s32     %r13, %r10, 60;
    add.s32     %r14, %r10, 80;
    add.s32     %r15, %r10, %r9;
"""


@pytest.mark.parametrize(
    "line",
    [
        "st.shared.v4.b32 \t[global_smem+64], {%r1, %r2, %r3, %r4};",
        "st.shared.v4.b32 \t[global_smem+56], {%r1, %r2, %r3, %r4};",
        "@%p2 st.shared.b32 [ %r11 + 4 ], %r1;",
        "ld.shared.b8 \t%rs1, [global_smem+79];",
        "ld.volatile.shared.v2.b32 \t{%r1, %r2}, [%r13];",
        "atom.shared.add.u32 \t%r1, [%r12+4], %r2;",
    ],
)
def test_what_lies_where_a_barrier_is_is_found(line: str) -> None:
    assert misused_barriers(BARRIERS + line) == [line]


@pytest.mark.parametrize(
    "line",
    [
        "st.shared.v4.b32 \t[global_smem+48], {%r1, %r2, %r3, %r4};",
        "st.shared.b32 \t[%r13], %r1;",
        "@%p2 st.shared.b64 [ %r14 + 0 ], %rd1;",
        "@%p2 mbarrier.arrive.shared::cta.b64 _, [%r11];",
        "st.global.b32 \t[%r11], %r1;",
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r12];",
        # Tiles, whose places threads compute: PTX does not show them.
        "st.shared.b32 \t[%r15+64], %r1;",
    ],
)
def test_what_lies_elsewhere_is_not(line: str) -> None:
    assert not misused_barriers(BARRIERS + line)


@pytest.mark.parametrize("place", ["[%r10+96]", "[global_smem+96]", "[ %r14 + 16 ]", "[%r16]"])
def test_a_barrier_is_found_however_its_address_is_written(place: str) -> None:
    line = "st.shared.b32 \t[global_smem+100], %r1;"
    begun = f"add.s32 %r16, %r14, 16;\n@%p1 mbarrier.init.shared::cta.b64 {place}, 1;\n"
    assert misused_barriers(BARRIERS + begun + line) == [line]
    below = "add.s32 %r17, %r14, -8;\nst.shared.b32 \t[%r17+-4], %r1;"
    assert misused_barriers(BARRIERS + below) == [below.splitlines()[1]]


@pytest.mark.parametrize(
    "ptx",
    [
        "mov.b32 %r10, global_smem;",
        "mbarrier.init.shared::cta.b64 [%r3], 1;",
        "mbarrier.init.shared::cta.b64 [%r3, %r4], 1;",
    ],
)
def test_it_is_not_silent_of_what_it_cannot_read(ptx: str) -> None:
    with pytest.raises(ValueError, match="barrier"):
        misused_barriers(ptx)
