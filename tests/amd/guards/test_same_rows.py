"""A repeated step finds its rows unchanged, and draft steps store one after the other."""

from collections.abc import Callable

import pytest
import torch

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch, draft_batch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.gate import AGAIN
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import ALL_ON

CPU = torch.device("cpu")
PROBLEM = small_problem()
PAGE = PROBLEM.page_size


# The last token of the request fills a page.
TOKENS = 3 * PAGE


class Repeating:
    """One request whose last step may run again; K and V of a token are its id."""

    def __init__(self, guards: Guards, *, graphs: bool = True) -> None:
        options = RuntimeOptions(num_pages=16, max_num_seqs=2, max_kv_len=32, provider="torch", capture_sizes=(1, 2))
        self.runtime: AttentionRuntime = build_runtime([PROBLEM], options, device=CPU, guards=guards)
        self.runner = StepRunner(self.runtime, self.forward, recorder_for(CPU) if graphs else None, check=NO_CHECK)
        self.row = self.runtime.table.admit()
        self.runtime.table.reserve(self.row, TOKENS)
        self.runner.run(StepBatch([self.row], [TOKENS - 1], [TOKENS - 1], list(range(1, TOKENS))))
        self.batch = StepBatch([self.row], [TOKENS], [1], [TOKENS])
        self.runner.run(self.batch)

    def forward(self, step: Part) -> torch.Tensor:
        ids = step.token_ids.float()[:, None, None]
        q, kv = torch.ones(len(ids), 6, 16), ids.expand(-1, 2, 16).contiguous()
        out = torch.zeros_like(q)
        step.layers.store_and_attend(0, q, kv, kv, out)
        return out[step.last_token_of_seq.long()]

    def last_stored(self) -> float:
        """Value of K in the place of the request's last token."""
        page = int(self.runtime.table.pages_of(self.row)[-1])
        return float(self.runtime.pool.layer(0).k[page, -1, 0, 0])


def given_to_another(served: Repeating) -> None:
    """Gives the row to another request, whose KV came from elsewhere."""
    table = served.runtime.table
    table.free(served.row)
    assert table.admit() == served.row
    table.reserve(served.row, TOKENS)
    served.runtime.pool.layer(0).k[1:] = -1.0
    table.mark_stored([served.row], [TOKENS])


def forked(served: Repeating) -> None:
    served.runtime.table.fork(served.row, TOKENS)


def kept(served: Repeating) -> None:
    served.runtime.table.kept.keep(served.row, 2, 3)


def cut(served: Repeating) -> None:
    served.runtime.table.truncate(served.row, TOKENS - 1)
    served.runtime.table.reserve(served.row, TOKENS)


CHANGES = [given_to_another, forked, kept, cut]


def run_by_runner(served: Repeating) -> None:
    served.runner.run_again(served.batch)


def stage_by_hand(served: Repeating) -> None:
    with served.runtime.stage(served.batch, AGAIN) as step:
        step.fill()
        served.forward(step.parts[0])


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("run", [run_by_runner, stage_by_hand], ids=lambda run: run.__name__)
def test_a_step_whose_row_has_changed_does_not_run_again(
    change: Callable[[Repeating], None], run: Callable[[Repeating], None], graphs: bool
) -> None:
    served = Repeating(ALL_ON, graphs=graphs)
    run(served)
    change(served)
    assert not served.runner.may_run_again
    with pytest.raises(WrongState, match=f"cannot run again: row {served.row} was freed, cut, forked or kept since"):
        run(served)
    served.runtime.table.reserve(served.row, TOKENS)
    served.runtime.check_device()


def test_a_step_runs_again_while_its_rows_are_its_own() -> None:
    served = Repeating(ALL_ON)
    other = served.runtime.table.admit()
    served.runtime.table.free(other)  # changes of another row do not affect this step
    run_by_runner(served)
    served.runtime.table.reserve(served.row, TOKENS + 5)
    served.runtime.table.truncate(served.row, TOKENS)  # room that was reserved ahead
    run_by_runner(served)
    served.runtime.table.kept.keep(served.row, 0, 2)  # it stores after these pages, as a prefix cache's requests do
    run_by_runner(served)
    given_to_another(served)
    with pytest.raises(WrongState):
        run_by_runner(served)
    assert served.last_stored() == -1.0

    served = Repeating(Guards().without("same_rows"))
    given_to_another(served)
    run_by_runner(served)
    assert served.last_stored() == TOKENS, "the other request's token was overwritten"


def test_another_batch_does_not_run_again(graphs: bool) -> None:
    served = Repeating(ALL_ON, graphs=graphs)
    run_by_runner(served)
    other = StepBatch([served.row], [TOKENS], [1], [TOKENS])
    with pytest.raises(WrongState, match="with another batch"):
        served.runtime.stage(other, AGAIN)
    with pytest.raises(WrongState, match="with another batch"):
        served.runner.run_again(other)
    run_by_runner(served)


DRAFTS = Drafts(1, 3)


def drafting(guards: Guards, order: list[int]) -> torch.Tensor:
    """Returns the output of the last draft step of a chain of three, after those in `order`. V of draft n is n + 1."""
    options = RuntimeOptions(num_pages=16, max_num_seqs=2, max_kv_len=32, provider="torch", drafts=(DRAFTS,))
    runtime = build_runtime([PROBLEM], options, device=CPU, guards=guards)
    runtime.pool.layer(0).fill_nan(slice(1, None))
    row = runtime.table.admit()
    runtime.table.reserve(row, DRAFTS.tokens)
    out = torch.zeros(0)
    with runtime.step(draft_batch([row], [0], DRAFTS, NO_TOKEN_IDS)) as round_:
        for number in order:
            part = round_.parts[number]
            q, k = torch.ones(len(part.token_ids), 6, 16), torch.zeros(len(part.token_ids), 2, 16)
            out = torch.zeros_like(q)
            part.layers.store_and_attend(0, q, k, k + number + 1, out)
    return out[0]


def test_draft_steps_store_one_after_the_other() -> None:
    assert torch.allclose(drafting(ALL_ON, [0, 1, 2]), torch.tensor(2.0))
    for order, late in (([2], 2), ([0, 2], 2), ([1, 0], 1)):
        with pytest.raises(WrongState, match=f"draft step {late} stores in layer 0"):
            drafting(ALL_ON, order)
    off = Guards().without("draft_order")
    assert drafting(off, [0, 2]).isnan().all(), "it has attended to a draft that no step has stored"


@pytest.mark.parametrize("share", [forked, kept], ids=lambda share: share.__name__)
def test_a_step_that_goes_back_does_not_store_over_what_was_shared_since_it_began(
    share: Callable[[Repeating], None],
) -> None:
    served = Repeating(ALL_ON)
    before = served.runtime.pool.layer(0).k.clone()
    with served.runtime.step(StepBatch([served.row], [6], [2], [30, 31])) as step:
        share(served)
        with pytest.raises(BadBatch, match=f"row {served.row} was forked or kept while its step runs"):
            served.forward(step.parts[0])
    assert torch.equal(served.runtime.pool.layer(0).k.nan_to_num(), before.nan_to_num())
    served.runtime.table.reserve(served.row, TOKENS + 1)
    served.runner.run(StepBatch([served.row], [TOKENS + 1], [1], [32]))
