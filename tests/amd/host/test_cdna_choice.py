"""The choice of decode and of extend for CDNA, the reasons against them elsewhere, and their probes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadTensor
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_ARCHS, EXTEND_CODES
from rocm_attn.machine.releases import Release
from rocm_attn.problem import Indexer, Indexing, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.by_tokens import KernelByTokens, serving
from rocm_attn.providers.contract import SMALLEST_POOL, BoundKernel
from rocm_attn.providers.mixed import TritonMixed
from rocm_attn.providers.select import Selection, select
from rocm_attn.providers.triton import TRITON, TritonExtend
from rocm_attn.providers.triton_cdna import CdnaDecode, CdnaExtend
from rocm_attn.providers.triton_sparse import SELECTED_ENTRIES, CdnaSelected
from rocm_attn.selection import probe, probe_runs
from rocm_attn.selection.kernels import choose_kernels
from rocm_attn.selection.probe_runs import FailedProbe
from tests.amd.host.choices import LAYER, adopting, reasons
from tests.amd.host.choices import with_triton as on
from tests.amd.host.test_measured_rows import row_of

KINDS = (StepKind.DECODE, StepKind.MIXED)
CDNA = ("triton.cdna_decode", "triton.cdna_extend+cdna_decode")
# Where extend for CDNA does not serve.
DECODE_ALONE = (CDNA[0], "triton.extend+cdna_decode")
PLAIN = ("triton.decode", "triton.extend+decode")
# Where extend for CDNA serves what its decode does not.
EXTEND_ALONE = (PLAIN[0], "triton.cdna_extend+decode")
ARCHS = ("gfx942", "gfx950")


def names(selection: Selection) -> tuple[str, ...]:
    return tuple(selection.kernel(kind).entry.name for kind in KINDS)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            {"head_dim": 64, "v_head_dim": 64, "num_q_heads": 9, "num_kv_heads": 9},
            "it reads KV heads of 64 in pairs",
        ),
        (
            {"head_dim": 64, "v_head_dim": 64, "num_kv_heads": 2},
            "16 query heads share a KV head of 64; at most 8 may",
        ),
    ],
    ids=str,
)
def test_what_it_does_not_serve_paged_decode_does_and_the_reason_is_said(
    arch: str, more: dict[str, Any], why: str
) -> None:
    selection = select(replace(LAYER, **more), on(arch), "triton")
    assert names(selection) in (PLAIN, EXTEND_ALONE)
    assert any(reason.startswith(why) for reason in reasons(selection, CDNA[0])), reasons(selection, CDNA[0])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("scales", [Scales.LAYER, Scales.HEAD, Scales.TOKEN])
def test_it_serves_heads_of_128_in_the_codes_that_the_arch_reads(arch: str, scales: Scales) -> None:
    coded = replace(LAYER, kv_encoding=KVEncoding(EXTEND_CODES[arch].value), kv_scales=scales)
    served = CDNA if scales is not Scales.TOKEN else DECODE_ALONE
    assert names(select(coded, on(arch), "triton")) == served
    narrow = select(replace(coded, head_dim=64, v_head_dim=64), on(arch), "triton")
    assert names(narrow) == (EXTEND_ALONE if scales is not Scales.TOKEN else PLAIN)
    assert reasons(narrow, CDNA[0]) == {f"it has no faster tiles for heads of 64 in 8 bits on {arch}"}
    (other,) = {*EXTEND_CODES.values()} - {EXTEND_CODES[arch]}
    foreign = select(replace(coded, kv_encoding=KVEncoding(other.value)), on(arch), "triton")
    assert names(foreign) == PLAIN
    assert reasons(foreign, CDNA[0]) == {
        f"it reads codes of {EXTEND_CODES[arch].value} on {arch}, not of {other.value}"
    }


def test_heads_of_256_have_tiles_where_they_gain() -> None:
    wide = replace(LAYER, head_dim=256, v_head_dim=256)
    assert names(select(wide, on("gfx942"), "triton")) == DECODE_ALONE
    selection = select(wide, on("gfx950"), "triton")
    assert names(selection) == PLAIN
    assert reasons(selection, CDNA[0]) == {"it has no faster tiles for heads of 256 in 16 bits on gfx950"}


# Strides of pages, tokens and heads, and the offset of K.
ALIGNED = {"vLLM's": (8192, 256, 128, 0), "heads before tokens": (8192, 128, 2048, 4096), "gaps": (8192, 288, 144, 16)}
UNALIGNED = {
    "gaps of 2": (8192, 260, 130, 0),
    "an odd beginning": (8192, 256, 128, 1),
    "odd pages": (8191, 256, 128, 0),
    "far": (4096, 128, 1 << 20, 0),
}


def engines_pages(page: int, token: int, head: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V of 5 pages, whose contents are never read."""
    memory = torch.empty(first + 5 * page + 16 * token + 2 * head + 4096, dtype=torch.bfloat16)
    k, v = (torch.as_strided(memory, (5, 16, 2, 128), (page, token, head, 1), first + side) for side in (0, 4096))
    return k, v


@pytest.mark.parametrize("what", ALIGNED)
def test_an_engines_aligned_rows_are_bound(what: str) -> None:
    attention = adopting(on("gfx942"), page_strides=True)
    assert names(attention.kernels().selections[0]) == CDNA
    attention.pages.bind(0, *engines_pages(*ALIGNED[what]))


@pytest.mark.parametrize("what", UNALIGNED)
def test_an_engines_unaligned_rows_are_refused_as_they_are_bound_or_served_by_another_kernel(what: str) -> None:
    """The refusal does not come during serving."""
    k, v = engines_pages(*UNALIGNED[what])
    with pytest.raises(
        BadTensor, match=r"triton\.cdna_decode reads rows that begin .* or build with unaligned_rows=True"
    ):
        adopting(on("gfx942"), page_strides=True).pages.bind(0, k, v)
    other = adopting(on("gfx942"), page_strides=True, unaligned_rows=True)
    assert names(other.kernels().selections[0]) == PLAIN
    other.pages.bind(0, k, v)


def test_tiles_that_were_measured_on_such_a_gpu_beat_it() -> None:
    target = on("gfx942")
    assert names(select(LAYER, target, "triton")) == CDNA
    selection = select(LAYER, replace(target, measured=(row_of(LAYER),)), "triton")
    assert names(selection) == EXTEND_ALONE
    assert reasons(selection, CDNA[0]) == {
        "tiles of triton.decode were measured for this layer on such a GPU; those of triton.cdna_decode were not "
        "measured, or were slower"
    }


def test_its_schedule_and_workspace_are_paged_decodes() -> None:
    ours = select(LAYER, on("gfx942"), "triton")
    other = select(LAYER, on("gfx942", Release.of("")), "triton")
    kernel, plain = (each.kernel(StepKind.DECODE).bound for each in (ours, other))
    assert isinstance(kernel, CdnaDecode)
    shape = PaddedShape(StepKind.DECODE, 64, 64)
    assert kernel.cut.programs == 8 * 304
    assert kernel.schedule.words(shape) == plain.schedule.words(shape)
    assert kernel.workspace_words(shape) == plain.workspace_words(shape)
    mixed = ours.kernel(StepKind.MIXED).bound
    assert isinstance(mixed, TritonMixed)
    assert mixed.decode == kernel


def test_what_no_amd_gpu_has_run_is_probed_before_it_serves() -> None:
    assert {row.name for row in TRITON.entries if row.is_probed} == {
        *CDNA,
        *DECODE_ALONE,
        EXTEND_ALONE[1],
        "triton.cdna_extend",
        "triton.cdna_chunk_decode",
        "triton.ranges+cdna_chunk_decode",
        "triton.cdna_latent_decode",
        "triton.latent_extend+cdna_latent_decode",
    }
    assert [entry.name for entry in SELECTED_ENTRIES if entry.is_probed] == [SELECTED, RECORDS]


SELECTED, RECORDS = "triton.cdna_selected", "triton.cdna_selected_records"
TOKENS = Indexing(0.1, 2048)
SELECTING = Problem(
    128, 1, 576, torch.bfloat16, 64, v_head_dim=512, scale=0.1, pool=PoolKind.LATENT, indexer=Indexer(64, 128, TOKENS)
)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_selection_of_latents_has_a_kernel_of_its_own(arch: str, has_sinks: bool) -> None:
    chosen = select(replace(SELECTING, has_sinks=has_sinks), on(arch), "triton").sparse
    assert chosen is not None
    assert chosen.entries == (SELECTED, "triton.indexer")
    assert chosen.entry.is_probed
    # A device of as many programs, two for each token; the same room for parts as the plain kernel has with such tiles.
    shape = PaddedShape(StepKind.DECODE, 2, 2)
    assert chosen.selected.workspace_words(shape) == 2 * 128 * 32 * (512 + 2)


def _in_records(arch: str) -> Problem:
    coded = replace(SELECTING, kv_encoding=KVEncoding(EXTEND_CODES[arch].value), kv_scales=Scales.GROUP)
    return replace(coded, has_sinks=True)


@pytest.mark.parametrize(("arch", "heads", "rows"), [("gfx942", 16, 32), ("gfx942", 128, 32), ("gfx950", 128, 64)])
def test_a_selection_of_records_has_one_too(arch: str, heads: int, rows: int) -> None:
    chosen = select(replace(_in_records(arch), num_q_heads=heads), on(arch), "triton").sparse
    assert chosen is not None
    assert (chosen.entries[0], chosen.entry.is_probed) == (RECORDS, True)
    assert isinstance(chosen.selected, CdnaSelected)
    assert chosen.selected.tiles.query_rows == rows


# The codes of each arch that the other one's hardware reads.
OTHERS = {"gfx942": KVEncoding.E4M3FN, "gfx950": KVEncoding.E4M3FNUZ}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "changed",
    [
        lambda layer, arch: replace(layer, head_dim=544),
        lambda layer, arch: replace(layer, kv_encoding=OTHERS[arch]),
        lambda layer, arch: replace(layer, indexer=Indexer(64, 128, replace(TOKENS, top=4096))),
    ],
    ids=["544", "codes", "4096_keys"],
)
def test_other_selections_of_records_have_the_kernel_of_every_layer(
    changed: Callable[[Problem, str], Problem], arch: str
) -> None:
    chosen = select(changed(_in_records(arch), arch), on(arch), "triton").sparse
    assert chosen is not None
    assert chosen.entries[0] == "triton.selected"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "layer",
    [
        replace(SELECTING, indexer=Indexer(64, 128, replace(TOKENS, top=4096))),
        replace(SELECTING, indexer=Indexer(64, 128, replace(TOKENS, top=512, unit_keys=4))),
        replace(SELECTING, head_dim=512),
        replace(SELECTING, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.LAYER),
    ],
    ids=["4096_keys", "units_of_4", "512", "codes"],
)
def test_other_selections_have_the_kernel_of_every_layer(layer: Problem, arch: str) -> None:
    chosen = select(layer, on(arch), "triton").sparse
    assert chosen is not None
    assert chosen.entries[0] == "triton.selected"


def test_a_selection_has_the_plain_kernel_with_other_releases() -> None:
    chosen = select(SELECTING, on("gfx942", Release.of("3.6.0")), "triton").sparse
    assert chosen is not None
    assert chosen.entries[0] == "triton.selected"


def test_what_is_only_compiled_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prewarm only compiles, for a GPU that is not here."""
    monkeypatch.setattr(probe, "random_run", lambda selection, device: pytest.fail("it was probed"))
    monkeypatch.setattr(probe, "selected_run", lambda selection, device: pytest.fail("it was probed"))
    first, second = choose_kernels(
        [LAYER, SELECTING], on("gfx942"), "triton", SMALLEST_POOL, device=torch.device("cpu")
    )
    assert names(first) == CDNA
    assert second.sparse is not None
    assert second.sparse.entries[0] == SELECTED


EXTENDING = (StepKind.EXTEND, StepKind.MIXED)
BY_CDNA = ("triton.cdna_extend", "triton.cdna_extend+cdna_decode")
WITH_DECODE = "triton.cdna_extend+decode"
# Query blocks have 64 tokens and eight rows of heads, and 64 of them are two programs for each of 256 compute units.
BLOCK_TOKENS, LEAST_TOKENS = 64, 64 * 64


def extend_names(selection: Selection) -> tuple[str, ...]:
    return tuple(selection.kernel(kind).entry.name for kind in EXTENDING)


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
    assert extend_names(selection) == (BY_CDNA[0], WITH_DECODE)
    mixed = selection.kernel(StepKind.MIXED).bound
    assert isinstance(mixed, TritonMixed)
    assert not isinstance(mixed.decode, CdnaDecode)
    for kind in EXTENDING:
        extend = by_tokens(selection, kind).other
        assert isinstance(extend, CdnaExtend)
        assert extend.problem == problem


def test_heads_of_64_in_16_bits_gain_less_and_need_twice_the_programs() -> None:
    layer = replace(LAYER, head_dim=64, v_head_dim=64)
    selection = select(layer, on("gfx950"), "triton")
    assert extend_names(selection) == BY_CDNA
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
    for kind in EXTENDING:
        bound = plain.kernel(kind).bound
        before = bound.extend if isinstance(bound, TritonMixed) else bound
        for num_seqs, num_tokens in ((1, 1), (4, 40), (4, 1000), (64, 1024), (1, LEAST_TOKENS - 1)):
            shape = PaddedShape(kind, num_seqs, num_tokens)
            assert extend_of(kind, num_seqs, num_tokens) == serving(before, shape)


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
        if small.kernel(StepKind.MIXED).entry.name == BY_CDNA[1]:
            assert isinstance(mixed.extend, CdnaExtend)
        return FailedProbe(BY_CDNA[0], "sequence 1 of 3 is wrong") if extend.entry.name == BY_CDNA[0] else None

    monkeypatch.setattr(probe, "random_run", wrong_extend)
    monkeypatch.setattr(probe, "edge_run", lambda selection, device: None)
    (selection,) = choose_kernels([LAYER], on("gfx950"), "triton", SMALLEST_POOL, device=torch.device("cuda"))
    assert extend_names(selection) == ("triton.extend", BY_CDNA[1])
    assert reasons(selection, BY_CDNA[0]) == {"switched off by its probe: sequence 1 of 3 is wrong"}
    assert isinstance(ran[0], CdnaExtend)
    assert not isinstance(ran[-1], CdnaExtend)
