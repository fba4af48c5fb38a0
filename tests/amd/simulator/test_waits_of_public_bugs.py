"""Missing waits that were found elsewhere: the mechanism of each, in assembly of our own, wrong and right.

The text of ROCm/aiter#5561 was not to be had; ROCm/aiter#3633 is a fault of the same kind in the same library.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from rocm_lab.simulator.core import POISON
from rocm_lab.simulator.faults import SimulationFault
from rocm_lab.simulator.lds import Lds
from rocm_lab.waits.check import Word
from tests.amd.simulator.test_waits import CDNA3, CDNA4, verdict_of

_PRODUCT = "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], v[8:11]"


@dataclass(frozen=True, slots=True)
class PublicBug:
    """A bug: code with WAIT, the line that was there, and the line that should have been."""

    code: str
    was: str
    should_be: str
    word: Word = Word.FAULT


BUGS = {
    # hipBLASLt's generator: the reads before the main loop were drained at the end of a round, and not on its entry.
    "ROCm/rocm-libraries#11174": PublicBug(
        f"ds_read_b64 v[2:3], v0\nds_read_b64 v[4:5], v0\nWAIT\nloop:\n{_PRODUCT}\nds_read_b64 v[2:3], v0\n"
        "ds_read_b64 v[4:5], v0\ns_waitcnt lgkmcnt(0)\ns_cbranch_scc1 loop",
        "s_nop 0",
        "s_waitcnt lgkmcnt(0)",
    ),
    # A wait for all but four reads, of which only three were later.
    "ROCm/rocm-libraries#3635": PublicBug(
        "ds_read_b64 v[2:3], v0\nds_read_b64 v[12:13], v0\nds_read_b64 v[14:15], v0\nds_read_b64 v[16:17], v0\nWAIT\n"
        "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], v[8:11]",
        "s_waitcnt lgkmcnt(4)",
        "s_waitcnt lgkmcnt(3)",
    ),
    # A wait that counts three reads, on a path that has only two of them.
    "ROCm/rocm-libraries#3017": PublicBug(
        "ds_read_b64 v[2:3], v0\nds_read_b64 v[12:13], v0\ns_cbranch_scc1 path\nds_read_b64 v[14:15], v0\npath:\nWAIT\n"
        "v_mov_b32_e32 v1, v2",
        "s_waitcnt lgkmcnt(2)",
        "s_waitcnt lgkmcnt(1)",
    ),
    # Scalar loads return in any order: a count above 0 is about no particular one.
    "ROCm/rocm-libraries#10929": PublicBug(
        "s_load_dwordx2 s[8:9], s[0:1], 0x0\ns_load_dwordx2 s[10:11], s[0:1], 0x8\nWAIT\ns_add_u32 s20, s8, s8",
        "s_waitcnt lgkmcnt(1)",
        "s_waitcnt lgkmcnt(0)",
    ),
    # The value that an atomic returns was taken for no load.
    "ROCm/rocm-libraries#9407": PublicBug(
        "global_atomic_add v1, v0, v2, s[0:1] sc0\nWAIT\nv_readfirstlane_b32 s4, v1", "s_nop 0", "s_waitcnt vmcnt(0)"
    ),
    # The wait for the input tensor in LDS came too late.
    "ROCm/aiter#3633": PublicBug(
        f"ds_read_b64 v[2:3], v0\nds_read_b64 v[4:5], v0\nWAIT\n{_PRODUCT}",
        "s_waitcnt lgkmcnt(1)",
        "s_waitcnt lgkmcnt(0)",
    ),
    # A load that comes after an instruction has written its register: it is overwritten.
    "ROCm/rocm-systems#7890": PublicBug(
        "global_load_dwordx2 v[2:3], v0, s[0:1]\nWAIT\nv_pk_mul_f32 v[2:3], v[4:5], v[6:7]\ns_waitcnt vmcnt(0)",
        "s_nop 0",
        "s_waitcnt vmcnt(0)",
    ),
    # A read moved up in an epilogue, without the wait for the load into LDS that it reads.
    "HazyResearch/HipKittens#40": PublicBug(
        "s_mov_b32 m0, 0\ns_nop 0\nbuffer_load_dword v0, s[0:3], 0 offen lds\nWAIT\ns_barrier\nds_read_b64 v[2:3], v1",
        "s_nop 0",
        "s_waitcnt vmcnt(0)",
        Word.NOT_CHECKED,
    ),
    # LLVM's GCNHazardRecognizer looks at a block once: it gives up there on the long way, and forgets the short one.
    # In our own latent decode, as Triton 3.9.0 compiled a variant of it.
    "LLVM's visited blocks": PublicBug(
        "v_mfma_f32_16x16x16_bf16 v[8:11], v[2:3], v[4:5], v[12:15]\ns_cbranch_scc1 short\n"
        + "v_or_b32_e32 v20, s2, v20\n" * 17
        + "s_branch short\nshort:\nWAIT\nv_max_f32_e32 v16, v9, v9",
        "s_setprio 0",
        "s_nop 6",
    ),
    # Triton's scheduled products: a copy of accumulators before the last product has written them.
    "facebookexperimental/triton#3417": PublicBug(
        "v_mfma_f32_16x16x16_f16 a[0:3], v[2:3], v[4:5], a[0:3]\nWAIT\nv_accvgpr_read_b32 v1, a0", "s_nop 2", "s_nop 7"
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
@pytest.mark.parametrize("arch", [CDNA3, CDNA4])
def test_a_public_bug_is_found_and_its_correction_proved(bug: PublicBug, arch: str) -> None:
    assert verdict_of(bug.code.replace("WAIT", bug.was), arch).word is bug.word
    assert verdict_of(bug.code.replace("WAIT", bug.should_be), arch).word is Word.PROVED


# The example of ROCm/rocm-systems#11202, whose checkers called it a fault: later reads stop at the full counter.
@pytest.mark.parametrize(("later", "word"), [(15, Word.PROVED), (14, Word.FAULT)])
def test_a_full_counter_proves_an_operation_and_the_largest_count_does_not(later: int, word: Word) -> None:
    reads = "\n".join(f"ds_read_b32 v{52 + number}, v16" for number in range(later))
    code = f"ds_read_b32 v51, v16\n{reads}\ns_waitcnt vmcnt(63) expcnt(7) lgkmcnt(15)\nv_perm_b32 v18, v51, v50, s77"
    assert verdict_of(code, CDNA4).word is word


def test_a_store_that_sinks_across_a_barrier_is_a_race_which_the_simulator_finds() -> None:
    """ROCm/rocm-libraries#10893: no wait is missing, a store is on the wrong side of a barrier."""
    sunk = "s_waitcnt lgkmcnt(0)\ns_barrier\nds_write_b32 v0, v1\nds_read_b32 v2, v3\ns_waitcnt lgkmcnt(0)"
    assert verdict_of(sunk).word is Word.PROVED
    lds = Lds(256, POISON)
    lds.barrier()
    lds.store(np.arange(64) * 4, np.ones((64, 4), np.uint8), wave=0)
    with pytest.raises(SimulationFault, match="without a barrier between them"):
        lds.load(np.arange(64) * 4, 4, wave=1)


def test_where_its_wait_sinks_instead_it_is_a_missing_wait() -> None:
    assert verdict_of("ds_write_b32 v0, v1\ns_barrier\ns_waitcnt lgkmcnt(0)\nds_read_b32 v2, v3").word is Word.FAULT
