"""Real weights over tensor-parallel ranks on a CPU: greedy tokens are transformers', for any number of ranks.

SmolLM2 has 9 query heads over 3 KV heads, which neither 2 nor 4 ranks divide.
"""

import json
import os
import select
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch

from rocm_serve.models.loading import LoadedModel, load_model
from rocm_serve.options import EngineOptions
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.request import Request
from tests.amd.house.source_tree import ROOT
from tests.amd.text.hf_reference import greedy_steps, hf_llama
from tests.amd.text.test_text_equality import CHAT_PROMPTS, NARROW, RAW_PROMPTS

NEW_TOKENS = 16
GENERATE = [sys.executable, "-m", "rocm_attn.cli", "generate", "--device", "cpu"]


# Each process of a rank loads the model. By day tests/amd/runner has ranks, and parts of this model for them.
at_night = pytest.mark.nightly


@at_night
@pytest.mark.parametrize(("num_ranks", "graphs"), [(2, True), (1, True), (2, False), (4, True), (4, False)])
def test_greedy_tokens_of_ranks_equal_those_of_transformers(num_ranks: int, graphs: bool, loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.encode_chat(CHAT_PROMPTS[0]), loaded.tokenizer.encode(RAW_PROMPTS[0])]
    requests = [Request(tuple(prompt), NEW_TOKENS) for prompt in prompts]
    options = EngineOptions(provider="torch", chunk=64, graphs=graphs, max_batch_size=4, max_kv_len=96, capture_after=0)
    with RankedEngine(partial(load_model, "smollm2", dtype=torch.float32), options, num_ranks=num_ranks) as engine:
        completions = engine.generate(requests)
        report = engine.report()
    assert (report.metrics.replays > NEW_TOKENS // 2) == graphs
    if num_ranks > 1:
        assert report.cost_of_ranks == ("9 query heads over 3 KV heads are padded to 12 over 4, 25% of them zeros",)
    reference = hf_llama(loaded)
    for request, completion in zip(requests, completions, strict=True):
        picks, gaps = greedy_steps(reference, request.prompt_token_ids, completion.token_ids)
        assert float(gaps.min()) > NARROW
        assert list(completion.token_ids) == picks
        assert len(picks) == NEW_TOKENS


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=at_night)])
def test_the_command_line_serves_on_each_number_of_ranks(num_ranks: int) -> None:
    arguments = ["--tp", str(num_ranks), "--json", "--max-new-tokens", "16", "What is the capital of France?"]
    finished = subprocess.run(
        [*GENERATE, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    printed = json.loads(finished.stdout)
    (france,) = printed["results"]
    assert "Paris" in france["text"]
    assert france["finish_reason"] == "stop"
    assert printed["report"]["ranks"] == num_ranks
    assert printed["report"]["captures"] == 0, "so short a run does not pay for a graph on a CPU"
    assert ("2 ranks share the model" in finished.stderr) == (num_ranks == 2)


@at_night
def test_ctrl_c_ends_the_command_and_all_ranks() -> None:
    """It goes to every process of a terminal; the command answers it, and no rank is left."""
    arguments = ["--tp", "2", "--raw", "--max-new-tokens", "4000", "Once upon a time"]
    command = subprocess.Popen(
        # A shell's job in the background starts with this signal ignored, and so would the command.
        ["env", "--default-signal=INT", *GENERATE, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert command.stdout is not None
    assert command.stdout.read(1), "the first piece of text has come, so the ranks run steps"
    with open(f"/proc/{command.pid}/task/{command.pid}/children") as file:
        ranks = [os.pidfd_open(int(pid)) for pid in file.read().split()]
    assert len(ranks) >= 2
    os.killpg(command.pid, signal.SIGINT)
    _, errors = command.communicate()
    assert command.returncode == 130, errors
    assert b"rocm-attn: interrupted" in errors
    assert b"Traceback" not in errors
    for rank in ranks:
        assert select.select([rank], [], [], 60)[0], "a rank did not end"
        os.close(rank)
