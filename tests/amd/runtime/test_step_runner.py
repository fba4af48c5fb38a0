"""Replayed steps: bitwise equal to the eager ones, after any earlier steps."""

import pytest
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.errors import BadBatch
from tests.amd.graphs.small_models import Tiny, come_and_go, same

pytestmark = pytest.mark.fast(interpreted=0)

COUNTS = [3, 5, 1, 8, 2, 7, 4, 4, 6, 1]


def test_replay_equals_eager_bitwise_while_requests_come_and_go(provider: str, device: torch.device) -> None:
    outs = []
    for graphs in (False, True):
        tiny = Tiny.build(device, provider)
        runner = tiny.runner(graphs=graphs)
        outs.append(come_and_go(runner, tiny.runtime, COUNTS))
        assert all(torch.isfinite(out).all() for out in outs[-1])
        assert runner.counters.replays == (len(COUNTS) if graphs else 0)
        runner.check_addresses()
    assert same(*outs)


@pytest.mark.parametrize("eagerly", [False, True])
def test_forgotten_token_ids_are_refused_and_never_run_as_zeros(
    provider: str, device: torch.device, eagerly: bool
) -> None:
    tiny = Tiny.build(device, provider, [4, 8])
    runner = tiny.runner(graphs=False)
    run = runner.run_eagerly if eagerly else runner.run
    row = tiny.runtime.table.admit()
    tiny.runtime.table.reserve(row, 3)
    with pytest.raises(BadBatch, match="3 new tokens and no token ids; pass token_ids, or NO_TOKEN_IDS"):
        run(StepBatch([row], [3], [3]))
    on_device = DeviceInputs(token_ids=torch.tensor([5, 7, 9], dtype=torch.int32, device=device))
    from_device = run(StepBatch([row], [3], [3], inputs=on_device)).clone()
    assert torch.equal(from_device, run(StepBatch([row], [3], [3], [5, 7, 9])))
    assert run(StepBatch([row], [3], [3], NO_TOKEN_IDS)).isfinite().all()
    assert len(run(StepBatch([], [], []))) == 0
