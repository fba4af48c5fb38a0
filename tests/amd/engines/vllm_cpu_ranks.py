"""A plug-in for each of vLLM's processes on a CPU, with parts that ranks which share contexts or layers need there.

vLLM makes no slots of tokens for ranks that share contexts. And a stage of a pipeline gets the memory that it receives
hidden states in only when the model is compiled, so eager steps fail, whichever backend serves.
"""

from itertools import pairwise
from typing import Any

_SLOTS, _LOAD, _RECEIVED = "compute_slot_mapping", "load_model", "make_empty_intermediate_tensors"


def register() -> None:
    """Replaces vLLM's slots, which still serve ranks that share nothing, and gives later stages their memory."""
    replace_slots()
    give_stages_memory()


def give_stages_memory() -> None:
    """Makes the tensors that a stage receives, as vLLM's own runner does before it compiles."""
    from vllm.distributed import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = getattr(CPUModelRunner, _LOAD)

    def loaded(self: Any, *given: Any, **named: Any) -> None:
        load(self, *given, **named)
        if not get_pp_group().is_first_rank:
            make = getattr(self.model, _RECEIVED)
            self.intermediate_tensors = make(batch_size=self.max_num_tokens, dtype=self.dtype, device=self.device)

    setattr(CPUModelRunner, _LOAD, loaded)


def replace_slots() -> None:
    """Replaces vLLM's slots, which still serve ranks that share nothing."""
    from vllm.v1.worker.block_table import BlockTable

    of_one_rank = getattr(BlockTable, _SLOTS)

    def slots(self: Any, *given: Any, **named: Any) -> None:
        if getattr(self, "dcp_world_size", 1) == 1:  # with whatever arguments a release calls it
            of_one_rank(self, *given, **named)
        else:
            num_reqs, starts, positions = given
            slots_of_rank(self, starts[: num_reqs + 1].tolist(), positions.tolist())

    setattr(BlockTable, _SLOTS, slots)


def slots_of_rank(table: Any, starts: list[int], positions: list[int]) -> None:
    """Writes the slot of each token that this rank keeps, and -1 for the others. table: a BlockTable of vLLM's"""
    block, ranks, stretch = table.block_size, table.dcp_world_size, table.cp_kv_cache_interleave_size
    table.slot_mapping.gpu.fill_(-1)
    for seq, (first, end) in enumerate(pairwise(starts)):
        for token in range(first, end):
            turn, rest = divmod(positions[token], stretch * ranks)
            local = turn * stretch + rest % stretch
            if rest // stretch == table.dcp_rank:
                place = int(table.block_table.gpu[seq, local // block])
                table.slot_mapping.gpu[token] = place * block + local % block
