"""The choice of the extend kernel for Hopper, and TMA's view of its pages."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadTensor
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.cuts import NEVER_SPLIT, Sequences
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.kernels.hopper import extend
from rocm_attn.kernels.hopper.extend import launch_hopper_extend
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.tuning.hopper_tiles import HEAD_DIMS
from rocm_attn.machine.releases import Release
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.by_tokens import KernelByTokens, serving
from rocm_attn.providers.contract import BoundKernel, StepBounds
from rocm_attn.providers.mixed import MixedAtOnce
from rocm_attn.providers.select import Selection, select
from rocm_attn.providers.shared_prefix import SharedPrefixKernel
from rocm_attn.providers.triton import TritonExtend
from rocm_attn.providers.triton_hopper import MIN_HEAD_DIM, TRITONS, HopperExtend
from rocm_attn.providers.triton_segments import SegmentExtend
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.prepared import works_by_launches
from tests.amd.host.choices import LAYER, adopting, with_triton
from tests.amd.kernels.attention_cases import Case, Tensors, build, extend_cut, garbage

HOPPER = {
    StepKind.EXTEND: "triton.hopper_extend",
    StepKind.MIXED: "triton.hopper_extend+decode",
    StepKind.SHARED: "triton.hopper_shared_prefix",
}
PLAIN_PAGES: dict[str, Any] = {}
CODED_PAGES: dict[str, Any] = {"kv": Encoding.E4M3FN, "scales": Scales.HEAD}
CODED: dict[str, Any] = {"kv_encoding": KVEncoding.E4M3FN, "kv_scales": Scales.HEAD}


def on(triton: Release) -> Target:
    return with_triton("sm_90", triton)


def chosen(problem: Problem, target: Target, **more: Any) -> Selection:
    return select(problem, target, "triton", **more)


def hopper_of(kernel: BoundKernel) -> HopperExtend:
    """Returns the kernel for steps whose sequences have many new tokens."""
    found = kernel.other if isinstance(kernel, KernelByTokens) else kernel
    assert isinstance(found, HopperExtend)
    return found


def kernels_by_tokens(kernel: Any) -> list[Any]:
    """Returns the kernels of all steps, for any number of new tokens per sequence."""
    return [*(sized.kernel for sized in kernel.short), kernel.other] if isinstance(kernel, KernelByTokens) else [kernel]


def engines_pages(k_first: int, v_first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V of 5 pages, k_first and v_first elements after a multiple of 16 bytes. They are never read."""
    size = 5 * 16 * 2 * 128
    k, v = (torch.empty(first + size, dtype=torch.bfloat16)[first:] for first in (k_first, v_first))
    return k.view(5, 16, 2, 128), v.view(5, 16, 2, 128)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("k_first", "v_first"), [(1, 0), (0, 4), (8, 7)])
def test_an_engines_pages_that_begin_off_16_bytes_are_refused_as_they_are_bound_or_served_by_the_plain_kernel(
    k_first: int, v_first: int, deterministic: bool
) -> None:
    """The refusal does not come during serving."""
    k, v = engines_pages(k_first, v_first)
    name = "triton.hopper_segment_extend" if deterministic else "triton.hopper_extend"
    with pytest.raises(BadTensor, match=rf"{name} reads sides that begin at multiples of 16 bytes; .*unaligned_rows"):
        adopting(on(TRITONS[0]), deterministic=deterministic).pages.bind(0, k, v)
    other = adopting(on(TRITONS[0]), unaligned_rows=True, deterministic=deterministic)
    selection = other.kernels().selections[0]
    assert not any("hopper" in kernel.entry.name for kernel in selection.kernels.values())
    reason = "it needs K and V at multiples of 16 bytes, and these may begin anywhere"
    assert {r.reason for r in selection.refusals if r.kernel == name} == {reason}
    other.pages.bind(0, k, v)


def test_pages_of_other_slots_than_were_promised_are_refused_as_they_are_bound() -> None:
    rows = torch.empty(5, 16, 2, 256, dtype=torch.bfloat16)
    attention = adopting(on(TRITONS[0]), page_strides=True, even_slots=True)
    assert attention.kernels().selections[0].kernel(StepKind.EXTEND).entry.name == "triton.hopper_extend"
    attention.pages.bind(0, rows[..., :128], rows[..., 128:])
    rows = rows.as_strided(rows.shape, (16 * 512 - 8, 512, 256, 1))
    with pytest.raises(BadTensor, match=r"chosen for slots at equal distances .*even_slots=False"):
        attention.pages.bind(0, rows[..., :128], rows[..., 128:])


@pytest.mark.parametrize("scales", [Scales.LAYER, Scales.HEAD, Scales.TOKEN])
def test_hoppers_kernel_takes_few_tokens_over_codes_too(scales: Scales) -> None:
    coded = replace(LAYER, **of_dim(64, kv_encoding=KVEncoding.E4M3FN, kv_scales=scales))
    assert isinstance(chosen(coded, on(TRITONS[0])).kernel(StepKind.EXTEND).bound, HopperExtend)


@pytest.mark.parametrize(
    ("dim", "window_left", "most", "of_many"),
    [
        (48, -1, 32, 32),
        (64, -1, 32, 64),
        (72, -1, 16, 16),
        (96, -1, 16, 64),
        (112, -1, 0, 0),
        (128, -1, 0, 64),
        (256, -1, 0, 32),
        *((dim, 1023, 64, 64) for dim in (64, 128, 192)),
        (256, 1023, 16, 32),
    ],
)
@pytest.mark.parametrize("ratio", [1, 4, 24])
def test_sequences_with_few_rows_are_the_plain_kernels_if_heads_are_narrow_windows_short_or_blocks_many(
    dim: int, window_left: int, most: int, of_many: int, ratio: int
) -> None:
    layer = replace(LAYER, **of_dim(dim, num_kv_heads=2, num_q_heads=2 * ratio, window_left=window_left))
    kernels = chosen(layer, on(TRITONS[0]))
    extend, mixed = kernels.kernel(StepKind.EXTEND).bound, kernels.kernel(StepKind.MIXED).bound
    assert isinstance(mixed, MixedAtOnce)
    for kernel, num_seqs, rows in ((extend, 98, most), (extend, 99, of_many), (mixed.extend, 99, most)):
        served = {
            q_len: serving(kernel, PaddedShape(StepKind.EXTEND, num_seqs, num_seqs * q_len)) for q_len in range(1, 70)
        }
        plain = {q_len for q_len, each in served.items() if isinstance(each, TritonExtend)}
        assert plain == set(range(1, rows // ratio + 1))
        assert all(isinstance(served[q_len], HopperExtend) for q_len in served.keys() - plain)


FP8 = {"kv_encoding": KVEncoding.E4M3FN}
DETERMINISTIC = {
    "triton.hopper_segment_extend": [
        {},
        {"dtype": torch.float16},
        {"head_dim": 64, "v_head_dim": 64},
        {"head_dim": 192, "v_head_dim": 192},
        {"head_dim": 256, "v_head_dim": 256},
        {"head_dim": 40, "v_head_dim": 40},
        {"head_dim": 80, "v_head_dim": 80},
        {"head_dim": 224, "v_head_dim": 224, "page_size": 2},
        {"head_dim": 192, "v_head_dim": 128},
        {"logits_soft_cap": 30.0},
        *({**FP8, "kv_scales": scales} for scales in (Scales.HEAD, Scales.TOKEN)),
        {**FP8, "head_dim": 64, "v_head_dim": 64, "kv_scales": Scales.LAYER},
    ],
    "triton.segment_extend": [
        {"window_left": 100},
        {**FP8, "head_dim": 192, "v_head_dim": 128, "kv_scales": Scales.HEAD},
        {"has_alibi_slopes": True},
    ],
}


@pytest.mark.parametrize(
    ("name", "more"), [(name, more) for name, each in DETERMINISTIC.items() for more in each], ids=str
)
def test_deterministic_extend_has_segments_and_key_blocks_of_deterministic_decode(
    name: str, more: dict[str, Any]
) -> None:
    """A token's bits do not depend on which of the two kernels computes it."""
    problem = replace(LAYER, **more)
    selection = chosen(problem, on(TRITONS[0]), deterministic=True)
    extend, mixed = (selection.kernel(kind).entry.name for kind in (StepKind.EXTEND, StepKind.MIXED))
    assert (extend, mixed) == (name, f"{name}+decode")
    decode: Any = selection.kernel(StepKind.DECODE).bound
    for kernel in kernels_by_tokens(selection.kernel(StepKind.EXTEND).bound):
        assert kernel.tiles.segment_len == decode.tiles.segment_len
        is_hopper = isinstance(kernel, HopperExtend)
        assert (kernel.tiles.value_block if is_hopper else kernel.tiles.extend.key_block) == decode.tiles.key_block
    elsewhere = chosen(problem, on(Release.of("3.9.0")), deterministic=True)
    assert elsewhere.kernel(StepKind.EXTEND).entry.name == "triton.segment_extend"


@pytest.mark.parametrize("dim", [192, 256])
def test_what_lies_left_of_a_segment_has_room_in_the_workspace_where_shared_memory_has_none(dim: int) -> None:
    layer = replace(LAYER, head_dim=dim, v_head_dim=dim)
    kernel = hopper_of(chosen(layer, on(TRITONS[0]), deterministic=True).kernel(StepKind.EXTEND).bound)
    assert kernel.cut.sharing.programs == 132
    words = kernel.workspace_words(PaddedShape(StepKind.EXTEND, 1, 4096))
    shared = replace(kernel.tiles, left_in_workspace=False).segment_words(programs=132, v_head_dim=dim)
    assert words == shared + 132 * 128 * dim
    case = Case([9], [5], heads=(32, 8), dims=(dim, dim), dtype=torch.bfloat16)
    tensors = build(case, torch.device("cpu"))
    args = tensors.args(garbage(kernel.cut.words(5, 1), torch.device("cpu")), torch.empty(words - 1))
    with pytest.raises(AssertionError):
        launch_hopper_extend(args, scores=tensors.scores, cut=kernel.cut, tiles=kernel.tiles)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_workspace_is_of_contiguous_float32(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes only its address."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # none of it is read
    monkeypatch.setattr(extend, "launch", lambda *args, **options: None)
    monkeypatch.setattr(extend, "launch_extend_merge", lambda *args, **options: None)
    monkeypatch.setattr(extend, "launch_merge_of_segments", lambda *args, **options: None)
    kernel = hopper_of(chosen(LAYER, on(TRITONS[0]), deterministic=deterministic).kernel(StepKind.EXTEND).bound)
    words = kernel.workspace_words(PaddedShape(StepKind.EXTEND, 1, 5))
    heads, dims = (LAYER.num_q_heads, LAYER.num_kv_heads), (LAYER.head_dim, LAYER.v_head_dim)
    tensors = build(Case([9], [5], heads=heads, dims=dims, dtype=torch.bfloat16), torch.device("cpu"))
    schedule = garbage(kernel.cut.words(5, 1), torch.device("cpu"))

    def launch_with(workspace: torch.Tensor) -> None:
        args = tensors.args(schedule, workspace)
        launch_hopper_extend(args, scores=tensors.scores, cut=kernel.cut, tiles=kernel.tiles)

    launch_with(torch.empty(words))
    for other in (torch.empty(words - 1), torch.empty(words, dtype=torch.float16), torch.empty(2 * words)[::2]):
        with pytest.raises(AssertionError):
            launch_with(other)


def test_prefixes_are_seen_whole() -> None:
    bound = chosen(LAYER, on(TRITONS[0])).kernel(StepKind.SHARED).bound
    assert isinstance(bound, SharedPrefixKernel)
    prefix = hopper_of(bound.prefix)
    assert not prefix.scores.visibility.causal
    assert not prefix.cut.sharing.causal


def launched_over(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensors, tuple[Any, ...]]:
    """Returns the step of a case, and its launch: grid, arguments and options."""
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        extend, "launch", lambda kernel, grid, *args, **options: launched.append((grid, *args, options))
    )
    monkeypatch.setattr(extend, "launch_extend_merge", lambda *args, **options: None)
    tensors = build(case, torch.device("cpu"))
    encoding = KVEncoding.LIKE_Q if case.kv is None else KVEncoding.E4M3FN
    (num_q_heads, num_kv_heads), (dim, _) = case.heads, case.dims
    layer = Problem(num_q_heads, num_kv_heads, dim, case.dtype, case.page_size, v_head_dim=dim, scale=dim**-0.5)
    selection = chosen(replace(layer, kv_encoding=encoding, kv_scales=case.scales), on(TRITONS[0]))
    kernel = hopper_of(selection.kernel(StepKind.EXTEND).bound)
    cut = extend_cut(tensors, kernel.tiles.extend, kernel.cut.sharing)
    workspace = torch.empty(cut.partials_words(query_rows=kernel.tiles.extend.query_rows, v_head_dim=dim))
    args = tensors.args(garbage(cut.words(200, 1), torch.device("cpu")), workspace)
    launch_hopper_extend(args, scores=tensors.scores, cut=cut, tiles=kernel.tiles)
    return tensors, launched[-1]


CHUNK: dict[str, Any] = {"kv_len": [300], "q_len": [200], "heads": (8, 2), "dtype": torch.bfloat16}
FORMS = [
    *((page_size, 128, coding) for page_size in (16, 128) for coding in (PLAIN_PAGES, CODED_PAGES)),
    (8, 128, CODED_PAGES),
    *((page_size, dim, PLAIN_PAGES) for page_size in (16, 48) for dim in (40, 72, 128, 224)),
]


@pytest.mark.fast(3)
@pytest.mark.parametrize(("page_size", "dim", "coding"), FORMS, ids=str)
def test_tma_sees_pages_as_rows_of_slots_and_boxes_within_a_page(
    page_size: int, dim: int, coding: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A box must not end in another page, or in another KV head."""
    case = Case(**CHUNK, dims=(dim, dim), page_size=page_size, **coding)
    tensors, (grid, _, k, v, *_) = launched_over(case, monkeypatch)
    slots = tensors.k_pages.shape[0] * page_size
    assert grid == (132,)  # persistent programs: rows are assigned to them
    for described, pages in ((k, tensors.k_pages), (v, tensors.v_pages)):
        assert described.base.data_ptr() == pages.data_ptr()
        assert described.base.element_size() == pages.element_size()
        *heads, keys, columns = described.block_shape
        # Heads that do not fill a tile end the tensor with each head: a box reads zeros beyond it.
        fills = dim % 64 == 0
        assert described.shape == ([slots, 2 * dim] if fills else [2, slots, dim])
        assert described.strides == ([2 * dim, 1] if fills else [dim, 2 * dim, 1])
        assert heads == ([] if fills else [1])
        assert page_size % keys == 0
        assert keys >= 8
        assert keys & (keys - 1) == 0
        assert columns == 64
        assert described.layout.swizzle_byte_width == columns * pages.element_size()


@pytest.mark.fast(2)
@pytest.mark.parametrize("dim", [128, 72])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 12, 24])
def test_pages_without_boxes_of_enough_keys_are_gathered(
    page_size: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, (_, _, k, v, *_) = launched_over(Case(**CHUNK, dims=(dim, dim), page_size=page_size), monkeypatch)
    assert (k.data_ptr(), v.data_ptr()) == (tensors.k_pages.data_ptr(), tensors.v_pages.data_ptr())


class DoesMore(HopperExtend):
    """A kernel whose attend is not declared to be only launches."""

    __slots__ = ()

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        HopperExtend.attend(self, args, step, bounds)


def test_of_kernels_by_tokens_that_of_the_steps_shape_counts() -> None:
    kernels = chosen(replace(LAYER, num_kv_heads=2, num_q_heads=8), on(TRITONS[0])).kernels
    extend, mixed = (kernels[kind].bound for kind in (StepKind.EXTEND, StepKind.MIXED))
    assert isinstance(extend, KernelByTokens)
    more = DoesMore(**{field.name: getattr(extend.other, field.name) for field in fields(HopperExtend)})
    assert works_by_launches(mixed, "attend", PaddedShape(StepKind.MIXED, 8, 2000))
    for by_tokens, long_is_prepared in ((extend, True), (replace(extend, other=more), False)):
        assert works_by_launches(by_tokens, "attend", PaddedShape(StepKind.EXTEND, 200, 400))
        assert works_by_launches(by_tokens, "attend", PaddedShape(StepKind.EXTEND, 1, 2000)) == long_is_prepared


def prefill_of(more: dict[str, Any]) -> KernelByTokens:
    """Returns the kernels for steps of new prompts only."""
    layer = replace(LAYER, **more)
    kernel = chosen(layer, on(TRITONS[0])).kernel(StepKind.PREFILL)
    assert kernel.entry.name == ("triton.prefill" if layer.head_dim < MIN_HEAD_DIM else "triton.hopper_prefill")
    assert isinstance(kernel.bound, KernelByTokens)
    return kernel.bound


def prompts(num_seqs: int, q_len: int) -> PaddedShape:
    return PaddedShape(StepKind.PREFILL, num_seqs, num_seqs * q_len)


def of_dim(dim: int, **more: Any) -> dict[str, Any]:
    return {"head_dim": dim, "v_head_dim": dim, **more}


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({}, 512),
        (of_dim(16), 2048),
        (of_dim(32, page_size=1), 2048),
        (of_dim(40), 512),
        (of_dim(64, has_sinks=True, dtype=torch.float16), 512),
        (of_dim(72, page_size=2), 512),
        (of_dim(96, num_kv_heads=32), 512),
        (of_dim(192, num_kv_heads=1), 512),
        ({"window_left": 511}, 384),
    ],
    ids=str,
)
def test_short_prefills_are_served_by_whole_rows_and_long_ones_as_extend_steps_are(
    more: dict[str, Any], most: int
) -> None:
    """A shared row would need a merge; whole ones need no workspace."""
    layer, kernel = replace(LAYER, **more), prefill_of(more)
    extend = chosen(layer, on(TRITONS[0])).kernel(StepKind.EXTEND).bound
    for num_seqs in (1, 16):
        for q_len in (2, 16, most):
            shape = prompts(num_seqs, q_len)
            served = kernel.of_shape(shape)
            assert isinstance(served, TritonExtend)
            assert served.cut.sharing.programs == served.workspace_words(shape) == 0
        longer = PaddedShape(StepKind.PREFILL, num_seqs, num_seqs * most + 1)
        assert isinstance(kernel.of_shape(longer), TritonExtend if layer.head_dim < MIN_HEAD_DIM else HopperExtend)
        assert kernel.of_shape(longer) == serving(extend, replace(longer, kind=StepKind.EXTEND))
    bounds = [sized.steps.max_q_len for sized in kernel.short]
    assert bounds == sorted(bounds)


def test_whole_rows_of_wide_heads_have_a_compute_unit_each() -> None:
    """More would run in turns, and each loads its keys again."""
    kernel, units = prefill_of(of_dim(256)), on(TRITONS[0]).compute_units
    most = units * 32 // LAYER.num_q_heads
    for num_tokens, served in ((most, TritonExtend), (most + 1, HopperExtend)):
        assert type(kernel.of_shape(PaddedShape(StepKind.PREFILL, 1, num_tokens))) is served
    assert type(kernel.of_shape(prompts(64, 2))) is TritonExtend, "blocks of more rows would be half empty"


@pytest.mark.parametrize(("window_left", "many"), [(-1, 3), (511, 2)])
def test_in_windows_more_rows_than_run_at_once_have_fewer_loads_in_flight(window_left: int, many: int) -> None:
    kernel = prefill_of(of_dim(64, window_left=window_left))
    served: list[Any] = [kernel.of_shape(prompts(num_seqs, 100)) for num_seqs in (1, 64)]
    assert [each.tiles.num_stages for each in served] == [3, many]


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_short_deterministic_prefills_are_served_by_whole_rows_too(dim: int) -> None:
    prefill = chosen(replace(LAYER, **of_dim(dim)), on(TRITONS[0]), deterministic=True).kernel(StepKind.PREFILL)
    assert prefill.entry.name == "triton.hopper_segment_prefill"
    kernel: Any = prefill.bound
    short = kernel.of_shape(prompts(3, 500 if dim <= 128 else 80))
    assert isinstance(short, SegmentExtend)
    assert short.cut.sharing.programs == 0
    assert isinstance(kernel.of_shape(prompts(3, 600)), HopperExtend)


@pytest.mark.parametrize("more", [{"logits_soft_cap": 30.0}, {"window_left": 126}], ids=str)
def test_other_prefills_are_extend_steps(more: dict[str, Any]) -> None:
    selection = chosen(replace(LAYER, **more), on(TRITONS[0]))
    assert StepKind.PREFILL not in selection.kernels
    assert selection.kernel(StepKind.PREFILL) is selection.kernel(StepKind.EXTEND)


def test_short_prefills_with_short_windows_are_served_by_whole_rows() -> None:
    selection = chosen(replace(LAYER, window_left=127), on(TRITONS[0]))
    assert selection.kernel(StepKind.PREFILL).entry.name == "triton.prefill"


def test_a_step_of_new_prompts_is_planned_for_their_kernel_and_others_are_not() -> None:
    options = RuntimeOptions(num_pages=64, max_num_seqs=4, max_kv_len=512, provider="triton", capture_sizes=(1,))
    runtime = build_runtime([LAYER], options, device=torch.device("cpu"), target=on(TRITONS[0]))
    names: list[str] = []
    for kv_len, q_len in (([100, 60], [100, 60]), ([100, 60], [100, 59]), ([100, 60], [100, 1])):
        batch = StepBatch(np.arange(2, dtype=np.int32), np.array(kv_len, np.int32), np.array(q_len, np.int32))
        names += [kernel.entry.name for kernel in runtime.gate.planner.plan(batch, None, 1).kernels]
    assert names == ["triton.hopper_prefill", HOPPER[StepKind.EXTEND], HOPPER[StepKind.MIXED]]


@pytest.mark.parametrize(
    ("arch", "dim", "window_left", "shares"),
    [
        ("sm_90", 128, 510, False),
        ("sm_90", 128, 512, True),
        ("sm_90", 136, 254, False),
        ("sm_90", 136, 256, True),
        ("gfx942", 128, 127, True),
    ],
)
@pytest.mark.parametrize("kind", [StepKind.EXTEND, StepKind.MIXED])
def test_rows_of_short_windows_are_not_shared_out(
    arch: str, dim: int, window_left: int, shares: bool, kind: StepKind
) -> None:
    layer = replace(LAYER, **of_dim(dim, window_left=window_left))
    bound: Any = chosen(layer, known_target(arch)).kernel(kind).bound
    if kind is StepKind.MIXED:
        bound = getattr(bound, "in_turn", bound).extend
    assert {kernel.cut.sharing.programs > 0 for kernel in kernels_by_tokens(bound)} == {shares}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_windows_shorter_than_the_least_are_the_plain_kernels(dim: int, deterministic: bool) -> None:
    problem = replace(LAYER, head_dim=dim, v_head_dim=dim)
    layers = [replace(problem, window_left=keys - 1) for keys in (511, 512)]
    target = on(TRITONS[0])
    names = [chosen(each, target, deterministic=deterministic).kernel(StepKind.EXTEND).entry.name for each in layers]
    kind = "segment_extend" if deterministic else "extend"
    assert names == [f"triton.{kind}", f"triton.hopper_{kind}"]


@pytest.mark.parametrize(
    ("dim", "window_left", "is_open"), [(128, 4094, False), (128, 4095, True), (128, -1, False), (256, 8191, False)]
)
def test_long_windows_of_some_heads_have_a_loop_without_masks(
    dim: int, window_left: int, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, launched = launched_over(Case(**CHUNK, dims=(dim, dim), window_left=window_left), monkeypatch)
    assert launched[-1]["G"].OPEN_MIDDLE is is_open


def test_sequences_with_cells_and_without_have_a_kernel_each_in_masked_steps_of_many_tokens() -> None:
    masked = replace(LAYER, custom_mask=True)
    *short, many = kernels_by_tokens(chosen(masked, on(TRITONS[0])).kernel(StepKind.MASKED).bound)
    assert {each.kernel.cut.sequences for each in short} == {Sequences.ALL}
    assert isinstance(many.extend.kernel, HopperExtend)
    assert isinstance(many.decode.kernel, TritonExtend)
    kernels: list[Any] = [many.extend.kernel, many.decode.kernel]
    assert [each.cut.sequences for each in kernels] == [Sequences.WITHOUT_CELLS, Sequences.WITH_CELLS]
    assert [each.reads_cells for each in kernels] == [False, True]
    *_, of_chunks = kernels_by_tokens(chosen(replace(masked, chunk=4096), on(TRITONS[0])).kernel(StepKind.MASKED).bound)
    assert of_chunks.kernel.cut.sequences is Sequences.WITHOUT_CELLS, "its tokens are given no cells"
    of_few, of_many = kernels_by_tokens(chosen(masked, known_target("gfx942")).kernel(StepKind.MASKED).bound)
    assert of_few.kernel.cut.sequences is Sequences.ALL
    assert of_many.extend.kernel.cut.sequences is Sequences.WITHOUT_CELLS


def test_deterministic_sequences_with_cells_and_without_have_a_kernel_each_too() -> None:
    masked = replace(LAYER, custom_mask=True)
    kernel = chosen(masked, on(TRITONS[0]), deterministic=True).kernel(StepKind.MASKED)
    assert kernel.entry.name == "triton.hopper_segment_masked"
    few, many = kernels_by_tokens(kernel.bound)
    assert few.kernel.cut.sequences is Sequences.ALL
    assert isinstance(many.extend.kernel, HopperExtend)
    kernels: list[Any] = [many.extend.kernel, many.decode.kernel]
    assert [each.cut.sequences for each in kernels] == [Sequences.WITHOUT_CELLS, Sequences.WITH_CELLS]
    # A span may reach further than a program has room for parts of a shared row.
    assert many.extend.kernel.cut.sharing.split_keys == NEVER_SPLIT


@pytest.mark.parametrize(
    ("chunk", "page_size", "deterministic", "kind"),
    [
        (8192, 16, False, "chunk_decode"),
        (8192, 16, True, "segment_chunk_decode"),
        (1536, 16, False, "chunk_decode"),
        (1536, 16, True, "segment_ranges"),  # decode's segments would begin elsewhere than those of extend
        (8192, 24, False, "ranges"),  # decode begins with a page
        (8192, 24, True, "segment_ranges"),
    ],
)
def test_layers_with_chunks_decode_like_others_if_a_chunk_begins_with_a_page(
    chunk: int, page_size: int, deterministic: bool, kind: str
) -> None:
    layer = replace(LAYER, chunk=chunk, page_size=page_size)
    for arch in ("sm_90", "gfx942", "gfx950"):
        selection = chosen(layer, known_target(arch), deterministic=deterministic)
        name = selection.kernel(StepKind.DECODE).entry.name
        assert name in (f"triton.{kind}", f"triton.cdna_{kind}")
        mixed = selection.kernel(StepKind.MIXED).entry.name
        assert mixed.endswith("chunk_decode") == name.endswith("chunk_decode")
