"""Tensor parallelism as in docs/your_own_runner.md: its engine on two ranks, each with its part of the model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.amd.house.source_tree import ROOT
from tests.amd.ranks import NUM_RANKS, among_all, on_every_rank

BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "your_own_runner.md").read_text(), re.DOTALL | re.MULTILINE
)
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")


def serve(rank: int) -> list[str]:
    """Runs the page's program with a rank's part of the model; returns the completions, and how steps ran."""
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n".join(BLOCKS[:-2]), "your_own_runner.md", "exec", dont_inherit=True), made)
    part = {}
    for name, weight in made["weights"].items():
        dim = 0 if any(each in name for each in BY_ROWS) else 1 if any(each in name for each in BY_COLUMNS) else None
        part[name] = weight if dim is None else weight.chunk(NUM_RANKS, dim)[rank].contiguous()
    config = made["LlamaConfig"](**made["config"].to_dict() | {"num_attention_heads": 2, "num_key_value_heads": 1})
    whole_linear, reduced = (
        made["linear"],
        {id(weight) for name, weight in part.items() if name.split(".")[-2] in BY_COLUMNS},
    )

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = whole_linear(x, weight)
        if id(weight) in reduced:
            dist.all_reduce(out)
        return out

    made["linear"] = linear
    engine = made["TinyEngine"](made["Llama"](config, part), made["options"], chunk=48, agree=among_all())
    requests = [made["Request"](prompt, max_new=24) for prompt in made["prompts"]]
    engine.generate(requests)
    made["linear"] = whole_linear
    counters = engine.runner.counters
    right = sum(request.tokens == made["wanted"](request) for request in requests)
    return [f"{right} of {len(requests)}", counters.graphs_off, str(counters.replays > 0), str(counters.fallbacks)]


@pytest.mark.nightly
def test_two_ranks_of_the_engine_serve_the_tokens_of_one(tmp_path: Path) -> None:
    assert on_every_rank(serve, tmp_path) == [["8 of 8", "", "True", "{}"]] * NUM_RANKS
