"""Steps of engines over AITER's kernels: verify steps, eager and replayed, and any with a sequence that is lost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

import rocm_attn.external
from rocm_attn.batch.step_kinds import FEW_TOKENS, StepKind
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import DeviceFault
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.paging.adopted import TableSource
from rocm_attn.paging.adopted_pages import EnginePages
from rocm_attn.paging.kv_pool import KVPool
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.step.external_step import Boundaries, ExternalStep, NewLengths
from rocm_attn.step.plan import StepPlan
from tests.amd.aiter.eight_bit_world import held_exactly
from tests.amd.aiter.serving import (
    CPU,
    GFX942,
    in_eight_bits,
    latent_problem,
    partly_torch,
    plain_problem,
    vectorised_problem,
)
from tests.amd.aiter.stand_in import StandIn
from tests.amd.integrations.oracle import Scores, attention
from tests.amd.tolerances import assert_attention_close

ROWS, ROOM = 4, 96
PROBLEMS = {
    "vectorised": (vectorised_problem(heads=(6, 2)), "pa_decode_gluon"),
    "vectorised, window": (replace(vectorised_problem(heads=(8, 1)), window_left=5), "pa_decode_gluon"),
    "latent": (latent_problem(5), "mla_decode_fwd"),
    "latent, eight bits": (in_eight_bits(latent_problem(16)), "get_mla_metadata_v1"),
}
each_problem = pytest.mark.parametrize(("problem", "function"), PROBLEMS.values(), ids=PROBLEMS)
each_engine = pytest.mark.parametrize("is_vllm", [False, True], ids=["sglang", "vllm"])


class Engine:
    """An engine of one layer: its table, pages and lengths, which are padded to ROWS sequences in every step.

    is_vllm: steps have boundaries, and pads no KV, as vLLM's; if not, new lengths and the number of sequences
    null_page: whether page 0 is no request's; if not, it is the first page of the first row
    """

    def __init__(
        self, problem: Problem, monkeypatch: pytest.MonkeyPatch, *, is_vllm: bool, null_page: bool = True
    ) -> None:
        self.problem, self.is_vllm, self.random = problem, is_vllm, torch.Generator().manual_seed(5)
        width = ROOM // problem.page_size
        num_pages = 1 + ROWS * width
        self.table = (torch.randperm(num_pages - 1, generator=self.random) + 1).int().view(ROWS, width)
        self.table[0, 0] *= int(null_page)
        self.rows_of_table = torch.arange(ROWS)
        # Triton serves nothing on a CPU, and AITER no prompts over latent pages in eight bits.
        monkeypatch.setattr(
            rocm_attn.external, "choose_kernels", lambda problems, *_, **__: tuple(map(partly_torch, problems))
        )
        self.attention = ExternalAttention(
            [LayerSource(problem)],
            TableSource(self.table, null_page=null_page),
            device=CPU,
            bounds=Bounds(num_seqs=ROWS, num_tokens=ROWS * ROOM, kv_len=ROOM, num_pages=num_pages),
            # A page of one token has no tail, so that nothing but new tokens is written there.
            options=ExternalOptions(zero_tails=problem.page_size > 1),
            target=GFX942,
        )
        (self.pages,) = KVPool([problem], num_pages=num_pages, page_size=problem.page_size, device=CPU).layers
        self.pages.fill_nan(slice(1, None))
        if problem.kv_scales is not Scales.NONE:
            assert self.pages.k_scale is not None
            self.pages.k_scale.fill_(2.0**-5)
        coded = EnginePages(self.pages.k_scale, self.pages.v_scale, self.pages.format)
        self.attention.pages.bind(0, self.pages.k, self.pages.v, coded)
        self.k, self.v = ([torch.zeros(0, problem.num_kv_heads, dim)] * ROWS for dim in self.dims)
        self.kv_len, self.new = (torch.zeros(ROWS, dtype=torch.int32) for _ in range(2))
        self.ends = torch.zeros(ROWS + 1, dtype=torch.int32)

    @property
    def dims(self) -> tuple[int, int]:
        return self.problem.head_dim, self.problem.v_head_dim

    def rows(self, num_tokens: int, padded: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, which pages hold exactly; NaN in padded rows."""
        problem = self.problem
        counts = (
            (problem.num_q_heads, self.dims[0]),
            (problem.num_kv_heads, self.dims[0]),
            (problem.num_kv_heads, self.dims[1]),
        )
        q, k, v = (torch.randn(padded, *each, generator=self.random).to(problem.dtype) for each in counts)
        k = held_exactly(k, problem, self.pages.k_scale)
        v = k[..., : self.dims[1]] if problem.pool is PoolKind.LATENT else v
        for each in (q, k, v):
            each[num_tokens:] = float("nan")
        return q, k, v

    def write(self, new: Sequence[int]) -> None:
        """Writes the lengths of a step of the first requests, and the engine's pads."""
        pads = [0] * (ROWS - len(new))
        self.kv_len.copy_(torch.tensor([len(k) + q for k, q in zip(self.k, new, strict=False)] + pads))
        self.new.copy_(torch.tensor([*new, *pads]))
        self.ends.copy_(torch.tensor([*accumulate([*new, *pads], initial=0)]))

    def begin(self, new: Sequence[int], padded: int, most: int, *, captured: bool) -> StepPlan:
        q = Boundaries(self.ends) if self.is_vllm else NewLengths(self.new)
        count = ROWS if self.is_vllm else len(new)
        return self.attention.begin(
            ExternalStep(count, ROWS, padded, self.kv_len, q, self.rows_of_table, 1, most, ROOM, captured=captured)
        )

    def run(self, new: Sequence[int], padded: int) -> StepPlan:
        """Runs an eager step of the first requests, and compares it with the reference."""
        self.write(new)
        given = self.rows(sum(new), padded)
        plan = self.begin(new, padded, max(new), captured=False)
        self.attention.fill()
        self.keep(new, given, self.forward(*given))
        return plan

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_full((len(q), self.problem.num_q_heads, self.dims[1]), 7.0)
        self.attention.layers.store_and_attend(0, q, k, v, out)
        return out

    def keep(self, new: Sequence[int], given: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
        """Records the rows that were stored, and compares a step's outputs with the float64 reference."""
        q, k, v = (torch.split(each, [*new, len(out) - sum(new)]) for each in given)
        for row, found in enumerate(torch.split(out, [*new, len(out) - sum(new)])[:-1]):
            self.keep_row(row, [each[row] for each in (q, k, v)], found)
        assert bool((out[sum(new) :] == 0).all())

    def keep_row(self, row: int, given: Sequence[Tensor], found: Tensor) -> None:
        """Does the same for one sequence."""
        problem, is_coded = self.problem, self.problem.kv_scales is not Scales.NONE
        q, k, v = given
        self.k[row], self.v[row] = torch.cat([self.k[row], k]), torch.cat([self.v[row], v])
        queries = q.to(problem.page_format.encoding.dtype) if is_coded else q
        scores = Scores(problem.scale, window_left=problem.window_left)
        rows, keys, values = (each.double().numpy() for each in (queries, self.k[row], self.v[row]))
        want, _ = attention(rows, keys, values, scores)
        assert_attention_close(found, torch.from_numpy(want), problem.dtype, eight_bit_products=is_coded)


@pytest.fixture
def engine(problem: Problem, is_vllm: bool, aiter: StandIn, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Returns an engine whose first three requests have 9, 2 and 7 tokens."""
    made = Engine(problem, monkeypatch, is_vllm=is_vllm)
    made.run([9, 2, 7], 20)
    aiter.calls.clear()
    return made


@pytest.mark.fast
@each_problem
@each_engine
def test_an_engines_steps_with_few_new_tokens_are_verify_steps(engine: Engine, function: str, aiter: StandIn) -> None:
    for new, padded in (([4, 4, 4], 16), ([4, 2, 3], 9), ([1, 4, 2], 8), ([2, 2], 16), ([3], 3)):
        assert engine.run(new, padded).shape.kind is StepKind.VERIFY
        assert function in aiter.calls
        aiter.calls.clear()
    assert engine.run([5, 2], 7).shape.kind is not StepKind.VERIFY


@pytest.mark.fast(2)
@each_problem
@each_engine
def test_one_graph_of_an_engine_serves_even_and_uneven_verify_steps(
    engine: Engine, function: str, aiter: StandIn
) -> None:
    engine.attention.seal(replace(engine.attention.bounds, num_tokens=ROWS * FEW_TOKENS))
    engine.write([])
    given = engine.rows(0, ROWS * FEW_TOKENS)
    plan = engine.begin([], ROWS * FEW_TOKENS, FEW_TOKENS, captured=True)
    assert plan.shape.kind is StepKind.VERIFY
    assert plan.replayable

    def body() -> Tensor:
        engine.attention.fill()
        return engine.forward(*given)

    recording, out = recorder_for(CPU).record(body)
    assert function in aiter.calls
    for new in ([4, 4, 4], [1, 3, 2], [2, 4], [3, 1, 1, 4]):
        engine.write(new)
        fresh = engine.rows(sum(new), len(out))
        for to, values in zip(given, fresh, strict=True):
            to.copy_(values)
        assert engine.begin(new, len(out), FEW_TOKENS, captured=True) is plan
        recording.replay()
        engine.keep(new, given, out)
        engine.run([1, 4, 2], 8)
    engine.attention.check_device()


@pytest.mark.parametrize("problem", [PROBLEMS["latent"][0]], ids=str)
@each_engine
def test_a_captured_step_that_may_have_more_tokens_than_a_verify_step_is_none(engine: Engine) -> None:
    engine.attention.seal()
    assert engine.begin([], ROWS * 8, 8, captured=True).shape.kind is StepKind.MIXED


LOST: Mapping[str, Callable[[Engine], None]] = {
    "no row": lambda engine: engine.rows_of_table.__setitem__(1, ROWS),
    "no KV": lambda engine: engine.kv_len.__setitem__(1, 0),
    "fewer keys than tokens": lambda engine: engine.kv_len.__setitem__(1, engine.new[1] - 1),
    "more keys than a row": lambda engine: engine.kv_len.__setitem__(1, ROOM + 1),
    "no page": lambda engine: engine.table.__setitem__((1, 0), -1),
}
LAYERS = {**{name: problem for name, (problem, _) in PROBLEMS.items()}, "plain": plain_problem()}


@pytest.mark.fast(4)
@pytest.mark.parametrize("problem", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("new", [[1, 1, 1], [3, 2, 4], [5, 7, 2], [3, 9, 4]], ids=str)
@pytest.mark.parametrize("lie", LOST)
@pytest.mark.parametrize("is_vllm", [True], ids=["vllm"])
def test_a_lost_sequence_harms_no_other_one(lie: str, new: list[int], engine: Engine, aiter: StandIn) -> None:
    """It has a key for each new token, as functions need, and maybe more tokens than max_seqlen_q, where grids end."""
    for name in ("mha_batch_prefill_func", "unified_attention", "mla_prefill_fwd"):
        aiter.change(name, lambda call: {"max_seqlen_q": max(max(new), call["max_seqlen_q"])})
    engine.write(new)
    LOST[lie](engine)
    given = engine.rows(sum(new), sum(new))
    engine.begin(new, sum(new), min(8, max(new)), captured=False)
    engine.attention.fill()
    out = engine.forward(*given)
    ends = [0, *accumulate(new)]
    for seq in (0, 2):
        here = slice(ends[seq], ends[seq + 1])
        engine.keep_row(seq, [each[here] for each in given], out[here])
    assert not out[ends[1] : ends[2]].any()
    with pytest.raises(DeviceFault):
        engine.attention.check_device()


def test_a_real_page_0_is_not_read_ahead(aiter: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no request's now, and was never written: each sequence's results were NaN."""
    engine = Engine(plain_problem(), monkeypatch, is_vllm=True, null_page=False)
    engine.table[0, 0] = engine.table[ROWS - 1, -1]
    engine.pages.k[0] = engine.pages.v[0] = float("nan")
    for new, padded in (([9, 2, 7], 20), ([1, 4, 2], 8), ([1, 1], 2)):
        engine.run(new, padded)
    engine.write([1, 1, 1])
    engine.table[2, 0] = -1  # the last sequence is lost
    given = engine.rows(2, 3)
    engine.begin([1, 1, 1], 3, 1, captured=False)
    engine.attention.fill()
    engine.keep([1, 1], given, engine.forward(*given))


@pytest.mark.parametrize("gone", [-1, 1_000_000])
@pytest.mark.parametrize(
    "problem", [PROBLEMS["vectorised, window"][0], replace(plain_problem(), window_left=5)], ids=str
)
@pytest.mark.parametrize("is_vllm", [True], ids=["vllm"])
def test_an_entry_before_a_window_may_be_any_number(gone: int, engine: Engine) -> None:
    """Functions begin with a whole tile of keys, or with the first page, and read beyond the pool."""
    engine.run([40, 33, 20], 93)
    engine.table[0, :2] = engine.table[1, :1] = gone
    for new, padded in (([1, 4, 2], 8), ([7, 2, 5], 14), ([1, 1], 2)):
        engine.run(new, padded)
    engine.attention.check_device()


@pytest.mark.parametrize("is_lost", [False, True])
def test_no_tail_of_a_pad_is_cleared_in_a_page_0_that_a_request_has(
    is_lost: bool, aiter: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step with a pad, or with a lost sequence, erased all but the first of the page's tokens, in silence."""
    engine = Engine(plain_problem(), monkeypatch, is_vllm=True, null_page=False)
    engine.run([9, 2, 7], 20)
    engine.write([1, 1, 1])
    engine.rows_of_table[2] = ROWS if is_lost else 2
    q, k, v = engine.rows(3, 3 + (not is_lost))
    engine.attention.begin(
        ExternalStep.decode(engine.kv_len[: len(q)], num_seqs=3, max_kv_len=ROOM, rows=engine.rows_of_table)
    )
    engine.attention.fill()
    out = engine.forward(q, k, v)
    for seq in range(3 - is_lost):
        engine.keep_row(seq, [each[seq : seq + 1] for each in (q, k, v)], out[seq : seq + 1])
