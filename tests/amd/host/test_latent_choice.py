"""The choice of latent decode for CDNA and for Hopper, and the part of a step that it serves."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.latent.limits import ANY_TOKENS
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_ARCHS, EXTEND_CODES
from rocm_attn.kernels.tuning.latent_tiles import LatentTiles
from rocm_attn.kernels.tuning.measured import TileTable
from rocm_attn.kernels.tuning.sparse_tiles import HOPPER_RECORD_TILES, HOPPER_SELECTED_TILES
from rocm_attn.machine.releases import Release
from rocm_attn.machine.target import Target
from rocm_attn.problem import ALL_KEYS, Indexer, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers import triton_hopper
from rocm_attn.providers.contract import OWN_POOL, SMALLEST_POOL, PoolTerms
from rocm_attn.providers.mixed import TritonMixed
from rocm_attn.providers.select import select
from rocm_attn.providers.sparse import BoundSelected
from rocm_attn.providers.triton_cdna_latent import CdnaLatentDecode
from rocm_attn.providers.triton_hopper_latent import HopperLatentDecode
from rocm_attn.providers.triton_latent import LatentDecode
from rocm_attn.providers.triton_sparse import HopperSelected, TritonEveryRow, TritonSelected
from rocm_attn.step.prepared import works_by_launches
from rocm_lab.tune.jobs import jobs_of, shapes_named
from tests.amd.host.choices import reasons
from tests.amd.host.choices import with_triton as on
from tests.amd.host.test_measured_rows import row_of

# DeepSeek-V3's layer on one of eight GPUs.
LAYER = Problem(16, 1, 576, torch.bfloat16, v_head_dim=512, page_size=64, scale=192**-0.5, pool=PoolKind.LATENT)
KINDS = (StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED)
CDNA = ("triton.cdna_latent_decode", "triton.latent_extend", "triton.latent_extend+cdna_latent_decode")
PLAIN = ("triton.latent_decode", "triton.latent_extend", "triton.latent_extend+decode")
HOPPER = on("sm_90", triton_hopper.TRITONS[0])


def names(problem: Problem, target: Target, terms: PoolTerms = OWN_POOL) -> tuple[str, ...]:
    """Returns names of the kernels of each kind."""
    selection = select(problem, target, "triton", pool=replace(SMALLEST_POOL, terms=terms))
    return tuple(selection.kernel(kind).entry.name for kind in KINDS)


@pytest.mark.parametrize("arch", EXTEND_ARCHS)
def test_cdnas_serves_one_token(arch: str) -> None:
    assert names(LAYER, on(arch)) == CDNA
    selection = select(LAYER, on(arch), "triton")
    decode, mixed = (selection.kernel(kind).bound for kind in (StepKind.DECODE, StepKind.MIXED))
    assert isinstance(decode, CdnaLatentDecode)
    assert decode.cut.programs == on(arch).compute_units
    assert isinstance(mixed, TritonMixed)
    assert mixed.decode == decode
    assert works_by_launches(decode, "attend", PaddedShape(StepKind.DECODE, 4, 4))


@pytest.mark.parametrize("arch", EXTEND_ARCHS)
def test_cdnas_serves_the_codes_that_the_arch_reads(arch: str) -> None:
    coded = replace(LAYER, kv_encoding=KVEncoding(EXTEND_CODES[arch].value), kv_scales=Scales.LAYER)
    assert names(coded, on(arch)) == CDNA


def test_programs_that_share_a_token_take_all_compute_units() -> None:
    decode = select(replace(LAYER, num_q_heads=128), on("gfx942"), "triton").kernel(StepKind.DECODE).bound
    assert isinstance(decode, CdnaLatentDecode)
    assert 2 * decode.cut.programs == on("gfx942").compute_units


@pytest.mark.parametrize("changes", [{"kv_encoding": KVEncoding.E4M3FN}, {"dtype": torch.float16}], ids=str)
def test_codes_of_the_other_arch_and_of_float16_are_the_plain_kernels(changes: dict[str, Any]) -> None:
    coded = replace(LAYER, kv_encoding=KVEncoding.E4M3FNUZ, kv_scales=Scales.LAYER)
    assert names(replace(coded, **changes), on("gfx942")) == PLAIN


def test_tiles_that_were_measured_on_such_a_gpu_beat_it() -> None:
    row = row_of(LAYER, TileTable.LATENT_DECODE, LatentTiles(16, 16, 4, 1, wide=True))
    target = replace(on("gfx942"), measured=(row,))
    assert names(LAYER, target) == PLAIN
    assert reasons(select(LAYER, target, "triton"), CDNA[0]) == {
        "tiles of triton.latent_decode were measured for this layer on such a GPU; those of triton.cdna_latent_decode "
        "were not"
    }


def test_steps_that_it_serves_are_not_searched() -> None:
    """A row of the other kernel would take its place, and was not compared with it."""
    jobs, left_out = jobs_of([LAYER], on("gfx942"), shapes_named("64d4k"))
    assert not jobs
    assert [line.endswith("no row is for 64d4k alone") for line in left_out] == [True]


def test_one_token_of_few_heads_is_the_plain_kernels_and_several_are_hoppers() -> None:
    """A program has 64 rows: one token of 16 heads would leave most of them empty."""
    assert names(LAYER, HOPPER) == (
        "triton.latent_decode",
        "triton.hopper_latent_extend",
        "triton.hopper_latent_extend+decode",
    )
    mixed = select(LAYER, HOPPER, "triton").kernel(StepKind.MIXED).bound
    assert isinstance(mixed, TritonMixed)
    assert isinstance(mixed.decode, LatentDecode)
    assert isinstance(mixed.extend, HopperLatentDecode)
    # Together they serve every number of new tokens once.
    tokens = mixed.extend.cut.tokens
    assert (mixed.decode.cut.tokens.MOST, tokens.FEWEST, tokens.MOST, tokens.OF_ROW) == (1, 2, ANY_TOKENS, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_one_launch_of_hoppers_serves_all_tokens_of_many_heads(kind: StepKind) -> None:
    bound = select(replace(LAYER, num_q_heads=128), HOPPER, "triton").kernel(kind).bound
    assert isinstance(bound, HopperLatentDecode)
    assert kind is StepKind.DECODE or (bound.cut.tokens.FEWEST, bound.cut.tokens.MOST) == (1, ANY_TOKENS)


# DeepSeek-V3.2's layer: latents, or records of them.
CHOSEN = replace(LAYER, num_q_heads=128, indexer=Indexer(64, 128, Indexing(128**-0.5, top=2048)))
IN_RECORDS = replace(CHOSEN, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.GROUP)
UNEVEN = replace(OWN_POOL, page_strides=True)
ANYWHERE = replace(OWN_POOL, unaligned_rows=True)


def attends(problem: Problem, target: Target, terms: PoolTerms = OWN_POOL) -> BoundSelected:
    """Returns the kernel that attends to the selection."""
    sparse = select(problem, target, "triton", pool=replace(SMALLEST_POOL, terms=terms)).sparse
    assert sparse is not None
    assert sparse.selected is not None
    return sparse.selected


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("problem", [CHOSEN, IN_RECORDS], ids=["latents", "records"])
def test_hoppers_attends_to_selections(problem: Problem, heads: int) -> None:
    kernel = attends(replace(problem, num_q_heads=heads), HOPPER)
    assert isinstance(kernel, HopperSelected)
    tiles = HOPPER_SELECTED_TILES if problem is CHOSEN else HOPPER_RECORD_TILES
    assert (kernel.registers, kernel.tiles) == (tiles, tiles.latent)
    assert kernel.describe().startswith("triton.hopper_selected(")


@pytest.mark.parametrize(
    ("problem", "target", "terms"),
    [
        (replace(CHOSEN, has_sinks=True), HOPPER, OWN_POOL),
        (replace(CHOSEN, dtype=torch.float32), HOPPER, OWN_POOL),
        (replace(CHOSEN, head_dim=544), HOPPER, OWN_POOL),
        (replace(CHOSEN, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.LAYER), HOPPER, OWN_POOL),
        (replace(IN_RECORDS, kv_encoding=KVEncoding.E4M3FNUZ), HOPPER, OWN_POOL),
        (CHOSEN, HOPPER, UNEVEN),
        (CHOSEN, HOPPER, ANYWHERE),
        (CHOSEN, on("sm_80", triton_hopper.TRITONS[0]), OWN_POOL),
        (CHOSEN, on("sm_90", Release((9, 9))), OWN_POOL),
    ],
    ids=["sinks", "float32", "dims", "codes", "encoding", "strides", "addresses", "arch", "triton"],
)
def test_the_plain_kernel_attends_to_selections_that_hoppers_does_not(
    problem: Problem, target: Target, terms: PoolTerms
) -> None:
    assert type(attends(problem, target, terms)) is TritonSelected


def test_records_without_a_selection_are_attended_by_hoppers_too() -> None:
    dense = replace(IN_RECORDS, indexer=ALL_KEYS)
    kernel = select(dense, HOPPER, "triton").kernel(StepKind.MIXED).bound
    assert isinstance(kernel, TritonEveryRow)
    assert isinstance(kernel.selected, HopperSelected)
