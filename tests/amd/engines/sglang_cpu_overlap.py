"""CPU substitutes for SGLang's two-batch overlap: a GPU's properties, and experts that communicate.

SGLang splits each batch, makes the halves' metadata and runs their layers in turns as it does on a GPU. Names are those
of SGLang 0.5.23 (sglang/srt/batch_overlap). Its code for AMD needs the properties only, and so does this one.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def overlap_on_a_cpu(log: Path) -> None:
    """Prepares SGLang for overlap on a CPU.

    log: receives a line of JSON for each batch of two halves: its mode, its sequences, and those of each half
    """
    import torch
    from sglang.srt.arg_groups import validation_hook
    from sglang.srt.batch_overlap import operations_strategy, two_batch_overlap

    validation_hook.check_two_batch_overlap = lambda _: None  # it requires experts that communicate
    torch.cuda.get_device_properties = lambda *_, **__: SimpleNamespace(multi_processor_count=1)  # type: ignore[assignment]  # as far as it is looked at
    operations_strategy._is_hip = two_batch_overlap._is_hip = True
    keep_experts_here()
    write_halves(log)


def keep_experts_here() -> None:
    """Calls this rank's experts in the place where tokens would be sent to experts of other ranks."""
    from sglang.srt.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    def dispatch(block: Any, state: Any) -> None:
        state.dispatch_output = state.pop("hidden_states_mlp_input"), state.pop("topk_output")

    def compute(block: Any, state: Any) -> None:
        state.combine_input = block.experts(*state.pop("dispatch_output"))

    def combine(block: Any, state: Any) -> None:
        state.hidden_states_after_combine = state.pop("combine_input")

    Qwen3MoeSparseMoeBlock.op_dispatch_b = dispatch
    Qwen3MoeSparseMoeBlock.op_experts = compute
    Qwen3MoeSparseMoeBlock.op_combine_b = combine


def write_halves(log: Path) -> None:
    """Writes the halves of each batch whose layers run in halves to `log`."""
    from sglang.srt.models import qwen2_moe

    run = qwen2_moe.model_forward_stages

    def logged(**given: Any) -> Any:
        batch = given["forward_batch"]
        halves = [half.batch_size for half in batch.tbo_children]
        with log.open("a") as out:
            print(json.dumps([batch.forward_mode.name, batch.batch_size, *halves]), file=out)
        return run(**given)

    qwen2_moe.model_forward_stages = logged
