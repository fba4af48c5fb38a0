"""The choice of extend for CDNA: the layers and the steps that it serves, and its probe before it serves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_ARCHS
from rocm_attn.machine.releases import Release
from rocm_attn.machine.target import Target
from rocm_attn.problem import KVEncoding, Scales
from rocm_attn.providers.by_tokens import KernelByTokens
from rocm_attn.providers.contract import SMALLEST_POOL, BoundKernel
from rocm_attn.providers.mixed import TritonMixed
from rocm_attn.providers.select import Selection, select
from rocm_attn.providers.triton import TritonExtend
from rocm_attn.providers.triton_cdna import TRITONS, CdnaDecode, CdnaExtend
from rocm_attn.selection import probe, probe_runs
from rocm_attn.selection.kernels import choose_kernels
from rocm_attn.selection.probe_runs import FailedProbe
from tests.amd.host.choices import LAYER, reasons, with_triton

KINDS = (StepKind.EXTEND, StepKind.MIXED)
CDNA = ("triton.cdna_extend", "triton.cdna_extend+cdna_decode")
WITH_DECODE = "triton.cdna_extend+decode"
# Query blocks have 64 tokens and eight rows of heads, and 64 of them are two programs for each of 256 compute units.
BLOCK_TOKENS, LEAST_TOKENS = 64, 64 * 64


def on(arch: str, triton: Release = TRITONS[-1]) -> Target:
    return with_triton(arch, triton)


def names(selection: Selection) -> tuple[str, ...]:
    return tuple(selection.kernel(kind).entry.name for kind in KINDS)


def by_tokens(selection: Selection, kind: StepKind) -> KernelByTokens:
    """The extend of a row, whose kernel depends on the step."""
    bound = selection.kernel(kind).bound
    extend = bound.extend if isinstance(bound, TritonMixed) else bound
    assert isinstance(extend, KernelByTokens)
    return extend


def extend_of(kind: StepKind, num_seqs: int, num_tokens: int) -> BoundKernel:
    return by_tokens(select(LAYER, on("gfx950"), "triton"), kind).of_shape(PaddedShape(kind, num_seqs, num_tokens))


OWN_CODES = {"gfx942": KVEncoding.E4M3FNUZ, "gfx950": KVEncoding.E4M3FN}


@pytest.mark.parametrize("arch", EXTEND_ARCHS)
@pytest.mark.parametrize(
    "more",
    [
        {"num_kv_heads": 1},
        {"head_dim": 192, "num_kv_heads": 32},
        {"kv_scales": Scales.HEAD, "num_kv_heads": 1},
        {"kv_scales": Scales.LAYER, "head_dim": 64, "v_head_dim": 64},
        {"kv_scales": Scales.HEAD, "head_dim": 192, "dtype": torch.float16},
    ],
    ids=str,
)
def test_layers_that_only_extend_serves_are_decoded_by_paged_decode(more: dict[str, Any], arch: str) -> None:
    encoding = OWN_CODES[arch] if "kv_scales" in more else KVEncoding.LIKE_Q
    problem = replace(LAYER, kv_encoding=encoding, **more)
    selection = select(problem, on(arch), "triton")
    assert names(selection) == (CDNA[0], WITH_DECODE)
    mixed = selection.kernel(StepKind.MIXED).bound
    assert isinstance(mixed, TritonMixed)
    assert not isinstance(mixed.decode, CdnaDecode)
    for kind in KINDS:
        extend = by_tokens(selection, kind).other
        assert isinstance(extend, CdnaExtend)
        assert extend.problem == problem


def test_codes_of_another_arch_keep_the_plain_kernel() -> None:
    layer = replace(LAYER, kv_encoding=KVEncoding.E4M3FNUZ, kv_scales=Scales.HEAD)
    selection = select(layer, on("gfx950"), "triton")
    assert not set(names(selection)) & {*CDNA, WITH_DECODE}
    why = "it reads codes of float8_e4m3fn on gfx950, not of float8_e4m3fnuz"
    assert any(reason.startswith(why) for reason in reasons(selection, CDNA[0])), reasons(selection, CDNA[0])


def test_heads_of_64_in_16_bits_gain_less_and_need_twice_the_programs() -> None:
    layer = replace(LAYER, head_dim=64, v_head_dim=64)
    selection = select(layer, on("gfx950"), "triton")
    assert names(selection) == CDNA
    kernel = by_tokens(selection, StepKind.EXTEND)
    assert isinstance(kernel.of_shape(PaddedShape(StepKind.EXTEND, 1, 2 * LEAST_TOKENS - 1)), TritonExtend)
    assert isinstance(kernel.of_shape(PaddedShape(StepKind.EXTEND, 1, 2 * LEAST_TOKENS)), CdnaExtend)


@pytest.mark.parametrize("kind", [StepKind.EXTEND, StepKind.MIXED, StepKind.PREFILL])
def test_steps_of_too_few_programs_keep_the_kernel_that_shares_rows_out(kind: StepKind) -> None:
    row = StepKind.MIXED if kind is StepKind.MIXED else StepKind.EXTEND
    kernel = by_tokens(select(LAYER, on("gfx950"), "triton"), row)
    fewer = kernel.of_shape(PaddedShape(kind, 1, LEAST_TOKENS - 1))
    assert isinstance(fewer, TritonExtend)
    assert fewer.cut.sharing.programs
    assert isinstance(kernel.of_shape(PaddedShape(kind, 1, LEAST_TOKENS)), CdnaExtend)


def test_with_fewer_heads_a_step_needs_more_tokens() -> None:
    """A rank of eight has one KV head, so 512 blocks of 64 tokens."""
    kernel = by_tokens(select(replace(LAYER, num_q_heads=4, num_kv_heads=1), on("gfx950"), "triton"), StepKind.EXTEND)
    assert isinstance(kernel.of_shape(PaddedShape(StepKind.EXTEND, 1, 512 * 64 - 1)), TritonExtend)
    assert isinstance(kernel.of_shape(PaddedShape(StepKind.EXTEND, 1, 512 * 64)), CdnaExtend)


def test_sequences_that_leave_a_third_of_a_block_empty_keep_the_plain_kernel() -> None:
    most = 2 * BLOCK_TOKENS // 3
    assert isinstance(extend_of(StepKind.EXTEND, 512, 512 * most), TritonExtend)
    assert isinstance(extend_of(StepKind.EXTEND, 512, 512 * (most + 1)), CdnaExtend)


def test_it_leaves_the_steps_of_few_tokens_as_they_were() -> None:
    plain = select(LAYER, on("gfx950", Release.of("3.8.0")), "triton")
    for kind in KINDS:
        bound = plain.kernel(kind).bound
        before = bound.extend if isinstance(bound, TritonMixed) else bound
        for num_seqs, num_tokens in ((1, 1), (4, 40), (4, 1000), (64, 1024), (1, LEAST_TOKENS - 1)):
            shape = PaddedShape(kind, num_seqs, num_tokens)
            same = before.of_shape(shape) if isinstance(before, KernelByTokens) else before
            assert extend_of(kind, num_seqs, num_tokens) == same


def test_a_step_has_room_for_the_schedule_and_the_workspace_of_either_kernel() -> None:
    kernel = by_tokens(select(LAYER, on("gfx950"), "triton"), StepKind.EXTEND)
    for num_tokens in (1, LEAST_TOKENS - 1, LEAST_TOKENS, 4 * LEAST_TOKENS):
        shape = PaddedShape(StepKind.EXTEND, 4, num_tokens)
        served = kernel.of_shape(shape)
        assert kernel.schedule.words(shape) >= served.schedule.words(shape)
        assert kernel.workspace_words(shape) >= served.workspace_words(shape)


def test_a_probe_runs_it_in_steps_that_are_too_small_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No MI355 has run it. If it is wrong, the plain kernel serves and the reason is reported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran: list[BoundKernel] = []

    def wrong_extend(selection: Selection, device: torch.device) -> FailedProbe | None:
        small = probe_runs._for_a_pool_of(selection, SMALLEST_POOL)
        extend = small.kernel(StepKind.EXTEND)
        ran.append(extend.bound)
        mixed = small.kernel(StepKind.MIXED).bound
        assert isinstance(mixed, TritonMixed)
        if small.kernel(StepKind.MIXED).entry.name == CDNA[1]:
            assert isinstance(mixed.extend, CdnaExtend)
        return FailedProbe(CDNA[0], "sequence 1 of 3 is wrong") if extend.entry.name == CDNA[0] else None

    monkeypatch.setattr(probe, "random_run", wrong_extend)
    monkeypatch.setattr(probe, "edge_run", lambda selection, device: None)
    (selection,) = choose_kernels([LAYER], on("gfx950"), "triton", SMALLEST_POOL, device=torch.device("cuda"))
    assert names(selection) == ("triton.extend", CDNA[1])
    assert reasons(selection, CDNA[0]) == {"switched off by its probe: sequence 1 of 3 is wrong"}
    assert isinstance(ran[0], CdnaExtend)
    assert not isinstance(ran[-1], CdnaExtend)
