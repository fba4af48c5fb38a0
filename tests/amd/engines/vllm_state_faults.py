"""Faults in the states of vLLM's own steps, planted where its runner names, copies and finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.amd.engines.vllm_cpu_states import ZERO, zero_right_pages

# The first step that a fault may be planted in; some wait for one with what they need.
FIRST_FAULTY_STEP = 5
_BUILD, _SLOTS, _COLLECT, _COPY = (
    "_build_attention_metadata",
    "mamba_get_block_table_tensor",
    "collect_mamba_copy_meta",
    "do_mamba_copy_block",
)


def swapped_states(slots: Tensor, planted: PlantedInStates) -> bool:
    """Gives the first two sequences each other's slots."""
    slots[:2] = slots[:2].flip(0)
    return True


def shared_state(slots: Tensor, planted: PlantedInStates) -> bool:
    """Gives the second sequence the slots of the first."""
    slots[1] = slots[0]
    return True


def unwritten_state(slots: Tensor, planted: PlantedInStates) -> bool:
    """Gives the first sequence a slot that no step has written."""
    slots[0, 0] = planted.num_slots - 1
    return True


def freed_state(slots: Tensor, planted: PlantedInStates) -> bool:
    """Gives the first sequence the slot of a request that has ended."""
    freed = sorted(planted.seen_before - set(slots.flatten().tolist()))
    if freed:
        slots[0, 0] = freed[0]
    return bool(freed)


FAULTS_OF_SLOTS: dict[str, Callable[[Tensor, PlantedInStates], bool]] = {
    each.__name__: each for each in (swapped_states, shared_state, unwritten_state, freed_state)
}
# A state is not copied when its sequence begins a block; a prompt found in the prefix cache gets another one's state.
LOST_COPY, WRONG_HIT = "lost_copy", "wrong_hit"
# Zeroes are written to pages of other blocks, as vLLM itself does on a CPU.
ZEROED_PAGES = "zeroed_pages"
# Sequences get each other's numbers of accepted drafts.
SWAPPED_COUNTS = "swapped_counts"
STATE_FAULTS = (*FAULTS_OF_SLOTS, LOST_COPY, WRONG_HIT, ZEROED_PAGES, SWAPPED_COUNTS)


class PlantedInStates:
    """Applies one fault to one step of an engine, and counts the steps after it.

    num_slots:   slots of the engine's states
    seen_before: slots of states in earlier rounds
    """

    def __init__(self, fault: str) -> None:
        from vllm.v1.attention.backends import gdn_attn, mamba_attn
        from vllm.v1.worker import gpu_model_runner, mamba_utils

        self.num_slots, self.seen_before = 0, set[int]()
        self._number, self._faulty, self._is_decode, self._seen = 0, -1, False, set[int]()
        self._our_numbers: dict[int, int] = {}
        self._before: list[tuple[Any, str, Any]] = []
        self._replace(gpu_model_runner.GPUModelRunner, _BUILD, self._counted)
        if fault in FAULTS_OF_SLOTS:
            for module in (gdn_attn, mamba_attn):
                self._replace(module, _SLOTS, self._with_wrong_slots(FAULTS_OF_SLOTS[fault]))
        elif fault == LOST_COPY:
            self._replace(mamba_utils, _COPY, self._without_copy)
        elif fault == WRONG_HIT:
            self._replace(mamba_utils, _COLLECT, self._from_another)
        elif fault == ZEROED_PAGES:
            from vllm.v1.worker.cpu_model_runner import CPUModelRunner

            self._replace(CPUModelRunner, ZERO, lambda _: zero_right_pages())
        else:
            for owner in (gdn_attn.GDNAttentionMetadataBuilder, mamba_attn.BaseMambaAttentionMetadataBuilder):
                self._replace(owner, "build", self._with_swapped_counts)

    @property
    def steps_later(self) -> int:
        """Number of steps between the faulty one and the one that was not begun."""
        return self._number - self._faulty - 1

    @property
    def faulty_step(self) -> int:
        """The number that our attention has given to the faulty step, -1 if there was none."""
        return self._our_numbers.get(self._faulty, self._faulty)

    def next_round(self) -> None:
        self.seen_before |= self._seen

    def undo(self) -> None:
        for owner, name, before in reversed(self._before):
            setattr(owner, name, before)

    def _replace(self, owner: Any, name: str, hook: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        self._before.append((owner, name, before))
        setattr(owner, name, hook(before))

    @property
    def _is_next(self) -> bool:
        """True if the fault is not planted yet, and may be in this step."""
        return self._number >= FIRST_FAULTY_STEP and self._faulty in (-1, self._number)

    def _counted(self, build: Any) -> Any:
        def counted(runner: Any, *given: Any, **named: Any) -> Any:
            self._number += 1
            self.num_slots = runner.kv_cache_config.num_blocks
            self._is_decode = named["num_tokens"] == named["num_reqs"]
            built = build(runner, *given, **named)
            ours = (each.step.number for each in built[0].values() if hasattr(each, "step"))
            self._our_numbers[self._number] = next(ours, self._number)
            return built

        return counted

    def _with_wrong_slots(self, fault: Callable[[Tensor, PlantedInStates], bool]) -> Callable[[Any], Any]:
        def hook(slots_of: Any) -> Any:
            def wrong(*given: Any, **named: Any) -> Tensor:
                slots: Tensor = slots_of(*given, **named).clone()
                self._seen |= set(slots[:, 0].tolist()) - {0}
                if self._is_next and self._is_decode and len(slots) > 1 and fault(slots, self):
                    self._faulty = self._number
                return slots

            return wrong

        return hook

    def _without_copy(self, copy: Any) -> Any:
        """Copies come before their step's metadata."""

        def lost(buffers: Any) -> None:
            if buffers.offset and self._faulty == -1:
                self._faulty = self._number + 1
            else:
                copy(buffers)

        return lost

    def _from_another(self, collect: Any) -> Any:
        def wrong(
            buffers: Any,
            config: Any,
            funcs: Any,
            groups: Any,
            source: int,
            target: int,
            bias: int,
            request: Any,
            more: Any,
        ) -> None:
            is_hit = not request.output_token_ids and request.num_computed_tokens == (source + 1) * self._block(config)
            others = self.seen_before - {block for group in groups for block in request.block_ids[group]}
            if is_hit and others and self._faulty == -1:
                self._faulty = self._number + 1
                blocks = tuple(list(each) for each in request.block_ids)
                for group in groups:
                    blocks[group][source] = min(others)
                request = _Request(blocks)
            collect(buffers, config, funcs, groups, source, target, bias, request, more)
            self._seen |= {request.block_ids[group][target] for group in groups}

        return wrong

    def _block(self, config: Any) -> int:
        return int(config.kv_cache_groups[0].kv_cache_spec.block_size)

    def _with_swapped_counts(self, build: Any) -> Any:
        def wrong(builder: Any, *given: Any, **named: Any) -> Any:
            counts = named.get("num_accepted_tokens")
            if counts is not None and self._is_next and len(counts) > 1 and counts[0] != counts[1]:
                self._faulty = self._number
                named["num_accepted_tokens"] = counts[[1, 0, *range(2, len(counts))]]
            return build(builder, *given, **named)

        return wrong


class _Request:
    """The part of a request's state that a copy reads."""

    def __init__(self, block_ids: tuple[list[int], ...]) -> None:
        self.block_ids = block_ids
