"""SGLang over two nodes, started by its own launcher as docs/scale.md says, with our backend on each."""

import json
from pathlib import Path

import pytest

from tests.amd.engines.nodes import served, two_nodes
from tests.amd.engines.serving import Rounds, assert_equal_tokens
from tests.amd.engines.sglang_plugin import FAULTS_LOG, HALVES_LOG, MODES_LOG, STATES_LOG
from tests.amd.engines.sglang_runs import SglangVenv
from tests.amd.engines.test_sglang import run

pytestmark = pytest.mark.nightly

PORT, MEETING_PORT, NEW_TOKENS = 8000, 20000, 12


def test_ranks_on_two_nodes_give_the_tokens_of_one(tmp_path: Path) -> None:
    """Each node has half of the heads."""
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    sglang = SglangVenv(plugin)
    # The server imports it for speech, and the environment lacks it.
    (plugin / "soundfile.py").touch()
    alone = run(sglang, "gemma3", NEW_TOKENS)
    (stock,) = sglang.stock([alone], tmp_path)
    options = [word for name, value in alone.engine.items() for word in (f"--{name.replace('_', '-')}", value)]
    start = [sglang.python, "-m", "sglang.launch_server", *options, "--attention-backend", "rocm_attn", "--port", PORT]
    start += ["--device", "cpu", "--disable-cuda-graph", "--skip-tokenizer-init"]
    with two_nodes() as nodes:
        together = ["--tp", 2, "--nnodes", 2, "--dist-init-addr", f"{nodes[0].address}:{MEETING_PORT}"]
        commands = [[*start, *together, "--node-rank", rank] for rank in range(2)]
        environments = [
            {
                **sglang.environment(),
                **{name: str(tmp_path / f"{name}{rank}") for name in (FAULTS_LOG, HALVES_LOG, MODES_LOG, STATES_LOG)},
                "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
                "SGLANG_HOST_IP": node.address,
                "GLOO_SOCKET_IFNAME": node.interface,
            }
            for rank, node in enumerate(nodes)
        ]
        with served(nodes, commands, environments, PORT, tmp_path) as logs:
            found: Rounds = []
            sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            for prompts in alone.rounds:
                body = {"input_ids": prompts, "sampling_params": sampling}
                found.append([each["output_ids"] for each in json.loads(nodes[0].ask(PORT, "/generate", body))])
            for log in logs:
                assert "rocm_attn serves SGLang" in log.read_text(), "our backend serves on each node"
    assert_equal_tokens([found], stock.tokens)
