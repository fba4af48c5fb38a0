"""vLLM over two nodes, started by its own launcher as docs/scale.md says, with our backend on each."""

import json
from pathlib import Path

import pytest

from tests.amd.engines.nodes import served, two_nodes
from tests.amd.engines.serving import Rounds, assert_equal_tokens
from tests.amd.engines.test_vllm import run
from tests.amd.engines.vllm_runs import VllmVenv

pytestmark = pytest.mark.nightly

PORT, NEW_TOKENS = 8000, 24


def test_a_pipeline_over_two_nodes_gives_the_tokens_of_one_process(tmp_path: Path) -> None:
    """Each node has half of the layers. The second one has no HTTP server."""
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    vllm = VllmVenv(plugin)
    alone = run(vllm, "vllm_llama", NEW_TOKENS)
    (stock,) = vllm.stock([alone], tmp_path)
    settings = {name: value for name, value in alone.args.items() if name not in ("model", "enable_chunked_prefill")}
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    start = [vllm.folder / "vllm" / "bin" / "vllm", "serve", alone.args["model"], *options]
    start += ["--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init", "--port", PORT]
    with two_nodes() as nodes:
        together = ["--pipeline-parallel-size", 2, "--nnodes", 2, "--master-addr", nodes[0].address]
        commands = [[*start, *together, "--node-rank", rank] + ["--headless"] * rank for rank in range(2)]
        environments = [
            {
                **vllm.environment(),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(rank),
                "VLLM_HOST_IP": node.address,
                "GLOO_SOCKET_IFNAME": node.interface,
                "ROCM_ATTN_TAKE_BACKENDS": "CPU_ATTN",
            }
            for rank, node in enumerate(nodes)
        ]
        with served(nodes, commands, environments, PORT, tmp_path) as logs:
            found: Rounds = []
            for prompts in alone.rounds:
                body = {"model": alone.args["model"], "prompt": prompts, "max_tokens": NEW_TOKENS, "temperature": 0}
                body |= {"ignore_eos": True, "return_token_ids": True}
                choices = json.loads(nodes[0].ask(PORT, "/v1/completions", body))["choices"]
                found.append([choice["token_ids"] for choice in sorted(choices, key=lambda each: each["index"])])
            for log in logs:
                assert "rocm_attn serves vLLM" in log.read_text(), "our backend serves on each node"
    assert_equal_tokens([found], stock.tokens)
