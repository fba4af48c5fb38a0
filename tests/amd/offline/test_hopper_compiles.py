"""The kernels for Hopper compile: they fit, and ptxas waits for their products where they do."""

import re
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.attention.cuts import NEVER_SPLIT, RowSharing
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales
from rocm_attn.kernels.experts.arguments import ProductArgs
from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.latent.limits import ANY_TOKENS
from rocm_attn.kernels.model.gate import SILU, GateForm
from rocm_attn.kernels.sparse.arguments import Indexing, SelectedArgs
from rocm_attn.kernels.tuning.hopper_tiles import (
    CODED_SEGMENT_DIMS,
    DIMS,
    HopperTiles,
    hopper_segment_tiles,
    hopper_tiles,
)
from rocm_attn.kernels.tuning.latent_tiles import HOPPER_LATENT_TILES
from rocm_attn.kernels.tuning.sparse_tiles import HOPPER_RECORD_TILES, HOPPER_SELECTED_TILES
from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.machine.target import known_target
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.providers.triton_hopper import TRITONS
from rocm_attn.providers.triton_later import hopper_launches
from rocm_lab.tune.ahead import wrong_in_code
from rocm_lab.tune.hopper import shared_bytes
from tests.amd.kernels.attention_cases import Case, build, extend_cut, garbage
from tests.amd.kernels.latent_cases import latent_decode_args
from tests.amd.kernels.sparse_cases import SelectedCase, Step, empty_selection
from tests.amd.offline.barriers import misused_barriers
from tests.amd.offline.code_object import read_nvidia_code
from tests.amd.offline.early_launches import assert_waits
from tests.amd.offline.nvidia_code import machine_code
from tests.amd.offline.offline_driver import compiled_by
from tests.amd.offline.state_matrix import ROWS as STATE_ROWS
from tests.amd.offline.unwritten_registers import unwritten_registers

pytestmark = [
    pytest.mark.oldest_triton,
    pytest.mark.skipif(
        Release.of(triton_version()) not in TRITONS,
        reason=f"it needs Triton {' or '.join(map(str, TRITONS))}, which the stages oldest and oldest-long have",
    ),
]

CASE = Case([300], [200], heads=(8, 2), dtype=torch.bfloat16)
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 100, "sinks": True},
    "to_all": {"window_right": UNLIMITED_WINDOW},
    "float16": {"dtype": torch.float16, "page_size": 8},
    "capped": {"soft_cap": 50.0},
    "capped_float16": {"soft_cap": 50.0, "dtype": torch.float16},
    "gathered": {"page_size": 2},
    "codes": {"kv": Encoding.E4M3FN, "scales": Scales.HEAD},
    "codes_by_token": {"kv": Encoding.E5M2, "scales": Scales.TOKEN},
}
# In every run; the second one gathers keys.
SHORT = (((128, 128), "plain"), ((96, 96), "gathered"))
# Bytes on the stack, by head dims and layer: outside of the loops, or still measured as the fastest.
SPILLED = {
    ((96, 96), "gathered"): 8,
    ((96, 96), "float16"): 8,
    ((128, 128), "window"): 24,
    ((192, 128), "gathered"): 24,
    ((192, 128), "float16"): 24,
    **{((192, 192), layer): {"window": 160, "capped": 32}.get(layer, 24) for layer in LAYERS},
    # Values of the program in the group that decodes.
    **{(dims, layer): 40 for dims in DIMS for layer in ("codes", "codes_by_token")},
    # The next row's queries, which arrive while results are written.
    **{((256, 256), layer): 256 for layer in LAYERS},
}
# Heads that fill no tile, with their masks.
SPILLED_OF_PADDED = {(40, 40): 0, (72, 72): 8, (144, 144): 24, (224, 224): 256, (96, 64): 0, (80, 128): 0}
# Products of many experts with 192 pairs in a block: values of the warps that load, between blocks.
SPILLED_OF_PRODUCTS = 24
# Deterministic attention, around the merge of segments.
SPILLED_AROUND_MERGES = {(64, 64): 16, (96, 96): 64, (128, 128): 80, (192, 128): 0, (192, 192): 40, (256, 256): 272}
# Groups that walk latents spill values of the program and its row over their loops.
SPILLED_OF_LATENTS = 96
SPILLED_OF_SELECTIONS = 32
# The group that decodes holds codes of the next half of a block.
SPILLED_OF_RECORDS = 136
# With more registers one program fits on a multiprocessor in place of two, and a chunk takes a third longer.
SPILLED_OF_STATES = 64


def compiled(case: Case, tiles: HopperTiles, *, early: bool = True) -> dict[str, CompiledKernel]:
    """Returns the kernels of a step in which nothing else runs, by name. early=False: those of a mixed step."""
    tiles = replace(tiles, extend=replace(tiles.extend, early=early))
    tensors = build(case, torch.device("cpu"))
    sharing = RowSharing(programs=known_target("sm_90").compute_units)
    if tiles.segment_len:
        sharing = sharing._replace(split_keys=NEVER_SPLIT, most_keys=tiles.most_keys)
    cut = extend_cut(tensors, tiles.extend, sharing)
    schedule = garbage(cut.words(sum(case.q_len), 1), torch.device("cpu"))
    words = cut.partials_words(query_rows=tiles.extend.query_rows, v_head_dim=case.dims[1])
    if tiles.segment_len:
        words = tiles.segment_words(programs=sharing.programs, v_head_dim=case.dims[1])
    workspace = torch.empty(words)

    def launch() -> None:
        args = tensors.args(schedule, workspace)
        hopper_launches.launch_hopper_extend(args, scores=tensors.scores, cut=cut, tiles=tiles, mask=tensors.mask)

    return {kernel.name: kernel for kernel in compiled_by(launch, "sm_90")}


@pytest.mark.parametrize(
    ("dims", "layer"),
    [
        pytest.param(dims, layer, marks=[pytest.mark.nightly] * ((dims, layer) not in SHORT))
        for dims in DIMS
        for layer in LAYERS
    ],
    ids=str,
)
def test_it_fits_and_its_products_are_not_waited_for_one_by_one(dims: tuple[int, int], layer: str) -> None:
    case = replace(CASE, dims=dims, **LAYERS[layer])
    tiles = hopper_tiles(*dims, case.page_size, coded=case.kv is not None)
    # If a cap bounds the sums there is no running maximum, and nothing to scale.
    asks = tiles.scales_seldom and layer != "capped"
    kernels = compiled(case, tiles)
    kernel = kernels["_hopper_extend_kernel"]
    # The search takes the description's word for it, and compiles nothing that does not fit.
    said = shared_bytes(tiles, Problem(8, 2, dims[0], torch.bfloat16, case.page_size, v_head_dim=dims[1], scale=1.0))
    # Scales of tokens take up to 4 KiB, and none where only heads have scales.
    assert 0 <= said - kernel.metadata.shared < 4608
    assert not wrong_in_code(kernel)
    assert_fast(kernels, SPILLED.get((dims, layer), 0), parameters_to_scale=asks)


@pytest.mark.nightly
def test_the_search_does_not_time_what_ptxas_waits_for_product_by_product() -> None:
    """With 168 registers a consumer of heads of 128 does not hold its running products."""
    tiles = replace(hopper_tiles(128, 128, 16, coded=False), registers=168)
    kernel = compiled(replace(CASE, dims=(128, 128)), tiles)["_hopper_extend_kernel"]
    assert wrong_in_code(kernel).startswith("pruned: ptxas waits for products 64 times, and the kernel 8 times")


@pytest.mark.parametrize("dim", [96, pytest.param(128, marks=pytest.mark.nightly)])
def test_what_mixed_steps_launch_does_too(dim: int) -> None:
    kernels = compiled(replace(CASE, dims=(dim, dim), page_size=2), hopper_tiles(dim, dim, 2, coded=False), early=False)
    assert len(kernels) == 2
    for kernel in kernels.values():
        assert "griddepcontrol" not in kernel.asm["ptx"]
    assert_sound(kernels["_hopper_extend_kernel"], SPILLED.get(((dim, dim), "gathered"), 0))


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", [2, 16])
@pytest.mark.parametrize("dims", SPILLED_OF_PADDED, ids=str)
def test_heads_that_fill_no_tile_do_too(dims: tuple[int, int], page_size: int) -> None:
    case = replace(CASE, dims=dims, page_size=page_size)
    tiles = hopper_tiles(*dims, case.page_size, coded=False)
    assert_fast(compiled(case, tiles), SPILLED_OF_PADDED[dims], parameters_to_scale=tiles.scales_seldom)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dims", "layer"),
    [*((dims, "plain") for dims in DIMS), *product(CODED_SEGMENT_DIMS, ("codes", "codes_by_token"))],
    ids=str,
)
def test_deterministic_extend_does_too(dims: tuple[int, int], layer: str) -> None:
    case = replace(CASE, dims=dims, **LAYERS[layer])
    tiles = hopper_segment_tiles(*dims, case.page_size, coded=case.kv is not None)
    assert_fast(
        compiled(case, tiles),
        SPILLED_AROUND_MERGES[dims],
        parameters_to_scale=tiles.scales_seldom,
    )


@pytest.mark.parametrize(
    ("heads", "layer"),
    [
        (128, "plain"),
        pytest.param(16, "to_all", marks=pytest.mark.nightly),
        pytest.param(64, "float16", marks=pytest.mark.nightly),
    ],
)
def test_decode_of_latents_does_too(heads: int, layer: str) -> None:
    most = 1 if heads == 128 else ANY_TOKENS
    case = replace(CASE, heads=(heads, 1), dims=(576, 512), q_len=[1 if most == 1 else 8], latent=True, **LAYERS[layer])
    tensors, tiles = build(case, torch.device("cpu")), HOPPER_LATENT_TILES
    units = known_target("sm_90").compute_units
    args, cut = latent_decode_args(tensors, tiles.latent, compute_units=units, most=most)

    def launch() -> None:
        hopper_launches.launch_hopper_latent_decode(args, scores=tensors.scores, cut=cut, tiles=tiles)

    kernels = {kernel.name: kernel for kernel in compiled_by(launch, "sm_90")}
    assert_fast(kernels, SPILLED_OF_LATENTS, parameters_to_scale=True, name="_hopper_latent_kernel")


@pytest.mark.parametrize(
    ("records", "tokens"),
    [(False, 2), (True, 200), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((False, 200), (True, 2)))],
    ids=str,
)
def test_attention_over_a_selection_does_too(records: bool, tokens: int) -> None:
    case = SelectedCase(
        Step([64] * tokens, [1] * tokens), heads=(128, 1), dims=(576, 512), latent=True, dtype=torch.bfloat16, width=200
    )
    if records:
        case = replace(case, encoding=Encoding.E4M3FN, scales=Scales.GROUP)
    tiles = HOPPER_RECORD_TILES if records else HOPPER_SELECTED_TILES
    args = blank_selected(case)

    def launch() -> None:
        hopper_launches.launch_hopper_selected(args, scale=0.05, tiles=tiles, programs=132)

    kernel, *merge = compiled_by(launch, "sm_90")
    assert (kernel.name, len(merge)) == ("_hopper_selected_kernel", tokens == 2)
    assert_sound(kernel, SPILLED_OF_RECORDS if records else SPILLED_OF_SELECTIONS)
    waits = len(re.findall(r"wgmma\.wait_group", kernel.asm["ptx"]))
    assert [each.opcode for each in machine_code(kernel).steps].count("WARPGROUP.DEPBAR.LE") == waits


@pytest.mark.parametrize("layer", ["kimi_linear", pytest.param("qwen3_next", marks=pytest.mark.nightly)])
def test_chunks_of_recurrent_layers_do_too(layer: str) -> None:
    (row,) = (row for row in STATE_ROWS if (row.arch, row.name, row.is_large) == ("sm_90", layer, False))
    kernels = {kernel.name: kernel for kernel in compiled_by(row.launch, "sm_90")}
    for name in ("_hopper_chunk_rows_kernel", "_hopper_chunk_walk_kernel"):
        assert_sound(kernels[name], SPILLED_OF_STATES)
        waits = len(re.findall(r"wgmma\.wait_group", kernels[name].asm["ptx"]))
        assert [each.opcode for each in machine_code(kernels[name]).steps].count("WARPGROUP.DEPBAR.LE") == waits


@pytest.mark.parametrize("size", range(4))
@pytest.mark.parametrize("gate", [GateForm(SILU), None], ids=["gated", "plain"])
def test_the_product_of_experts_does_too(gate: GateForm | None, size: int) -> None:
    from rocm_attn.kernels.hopper import expert_product

    sides = 1 if gate is None else 2
    x, weight = torch.empty(64, 256, dtype=torch.bfloat16), torch.empty(512, 512, 256, dtype=torch.bfloat16)
    expert = torch.arange(640).view(64, 10) % 512
    out, bias = x.new_empty(640, 512 // sides), weight[:, :, 0].contiguous()
    groups = ExpertGroups.of(expert, 512)
    if gate is None:
        args = ProductArgs.of_experts(x.expand(10, 64, 256).flatten(0, 1), weight, bias, groups, None, out)
    else:
        args = ProductArgs.of_experts(x, weight, bias, groups, groups.tokens, out, gate)
    columns, num_groups, _ = chosen = expert_product.BLOCK_SIZES[size]
    with patch.object(expert_product, "block_size", return_value=chosen):
        (kernel,) = compiled_by(lambda: expert_product.launch_hopper_expert_product(args, compute_units=132), "sm_90")
    ptx = kernel.asm["ptx"]
    wgmma = r"wgmma\.mma_async\.sync\.aligned\.m64n{}k16"
    assert re.search(wgmma.format(columns), ptx)
    assert bool(re.search(wgmma.format(columns // 2), ptx)) == (num_groups > 2)
    assert_waits(kernel, reads_before=False)
    assert_sound(kernel, SPILLED_OF_PRODUCTS if num_groups > 2 else 0)
    waits = len(re.findall(r"wgmma\.wait_group", ptx))
    assert [each.opcode for each in machine_code(kernel).steps].count("WARPGROUP.DEPBAR.LE") == waits


@pytest.mark.parametrize("experts", [(8, 2, 4160), (8, 2, 12800), (64, 6, 1856), (512, 10, 1088)], ids=str)
def test_a_product_of_experts_has_no_variant_that_powers_of_two_have_not(experts: tuple[int, int, int]) -> None:
    """Kernels are compiled ahead for prompts of 1, 2, 4, ... tokens."""
    ahead = {block_size(1 << power, *experts) for power in range(13)}
    assert {block_size(tokens, *experts) for tokens in range(1, 1 << 12)} <= ahead
    assert len(ahead) > 1


def test_blocks_have_a_third_group_of_pairs_where_experts_have_pairs_for_it() -> None:
    assert [block_size(tokens, 512, 10, 1024)[1] for tokens in (32, 256, 2048, 8192)] == [2, 2, 2, 3]


def block_size(tokens: int, experts: int, chosen: int, width: int) -> tuple[int, ...]:
    """Returns columns, groups of pairs and stages of a product's blocks on an H200."""
    from rocm_attn.kernels.hopper import expert_product

    weight = torch.empty(1, device="meta").expand(experts, width, 64)
    x, out = weight[0, :1].expand(tokens, 64), weight[0, :, :1].t().expand(tokens * chosen, width)
    return expert_product.block_size(ProductArgs(x, weight, None, out, None, x, x, None), 132)


def blank_selected(case: SelectedCase) -> SelectedArgs:
    """Returns arguments of a case's shapes, for a launch that is compiled only."""
    num_tokens, num_pages = case.step.num_tokens, case.step.num_pages
    head_dim, v_head_dim = case.dims
    form = PageFormat(
        case.encoding or Encoding.of(case.dtype), PoolKind.LATENT, 16, 1, head_dim, v_head_dim, case.scales
    )
    q = torch.empty(num_tokens, case.heads[0], head_dim, dtype=case.dtype)
    return SelectedArgs(
        q=q,
        pages=LayerPages.latent(torch.empty(num_pages, form.line, dtype=form.encoding.dtype), form),
        table=case.step.table,
        tokens=case.step.tokens(q.device),
        selection=empty_selection(num_tokens, Indexing(1.0, case.width), q.device),
        out=q[..., :v_head_dim].clone(),
        lse=torch.empty(q.shape[:2]),
        sinks=None,
        workspace=torch.empty(1 << 22),
    )


def assert_fast(
    kernels: dict[str, CompiledKernel], spilled: int, *, parameters_to_scale: bool, name: str = "_hopper_extend_kernel"
) -> None:
    """Asserts that the kernel fits, spills at most `spilled` bytes, and waits where the source does.

    parameters_to_scale: true if warps with no row to scale skip scaling
    """
    kernel, merge = kernels.pop(name), kernels.popitem()[1]
    assert not kernels
    assert_waits(kernel, reads_before=False)
    assert_waits(merge, reads_before=True)
    assert_sound(kernel, spilled)
    assert not [*unwritten_registers(machine_code(merge))]
    opcodes = [each.opcode for each in machine_code(kernel).steps]
    assert ("VOTE.ANY" in opcodes) == parameters_to_scale
    waits = len(re.findall(r"wgmma\.wait_group", kernel.asm["ptx"]))
    assert opcodes.count("WARPGROUP.DEPBAR.LE") == waits


def assert_sound(kernel: CompiledKernel, spilled: int) -> None:
    """Asserts that it fits, spills at most `spilled` bytes, and keeps off running products, barriers and garbage."""
    code = read_nvidia_code(kernel)
    assert not code.touched
    assert not code.unwritten
    # Only the rows of chunks are made by one task, without barriers between groups.
    if kernel.name != "_hopper_chunk_rows_kernel":
        assert not misused_barriers(kernel.asm["ptx"])
    assert code.stack_bytes <= spilled
    assert code.local_bytes == 0
    assert code.shared_bytes <= known_target("sm_90").lds_bytes
    assert code.matrix_ops > 0
