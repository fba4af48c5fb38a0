"""Runs of vllm_text in vLLM's own virtual environment, which ENGINE_VENVS names: FOLDER/vllm.

`bash scripts/engine_venv.sh vllm` makes it. The answers of vLLM's own backend do not depend on this project, and are
kept next to it for the next time.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.amd.engines.serving import (
    engine_folder,
    environment_without_settings,
    kept_answers,
    python_of,
    python_path,
    write_metadata,
)
from tests.amd.engines.vllm_text import Answer, Run

# The release in the environment.
VLLM = "0.32.0"
_ENTRY_POINTS = (
    "[vllm.general_plugins]\n"
    "rocm_attn = rocm_attn.integrations.vllm:register\n"
    "shared_slots = tests.amd.engines.vllm_cpu_ranks:register\n"
    "states = tests.amd.engines.vllm_cpu_states:register\n"
    "images = tests.amd.engines.vllm_images:register\n"
)


class VllmVenv:
    """A virtual environment with vLLM, and a folder for files made once. plugin: with our package's metadata"""

    def __init__(self, folder: Path, plugin: Path) -> None:
        self.folder, self.plugin = folder, plugin

    @property
    def python(self) -> Path:
        return python_of(self.folder, "vllm")

    def ours(
        self, runs: Sequence[Run], scratch: Path, *, release: str = VLLM, watches_states: bool = False
    ) -> list[Answer]:
        """Returns the answers of our backend, in the place of vLLM's own ones.

        release: the Python of another release than the environment's runs over this one's compiled part
        watches_states: whether the plug-in checks vLLM's recurrent states
        """
        settings = {"ROCM_ATTN_TAKE_BACKENDS": "CPU_ATTN,CPU_MLA", "ROCM_ATTN_WATCH_STATES": str(int(watches_states))}
        if release != VLLM:
            tree = self.folder / "vllm" / f"python-{release}"
            assert (tree / "vllm").is_dir(), f"{tree} is missing: remove {self.folder / 'vllm'} and make it anew"
            settings |= {
                "VLLM_TARGET_DEVICE": "cpu",
                "PYTHONPATH": os.pathsep.join(map(str, (tree, *python_path(self.plugin)))),
            }
        answers, said = self._answers(runs, scratch, settings)
        assert f"rocm_attn serves vLLM {release}" in said, "our backend did not serve"
        return answers

    def stock(self, runs: Sequence[Run], scratch: Path) -> list[Answer]:
        """Returns the answers of vLLM's own backends."""

        def stock_answers() -> list[dict[str, Any]]:
            answers, said = self._answers(runs, scratch, {"ROCM_ATTN_DISABLE_PLUGINS": "vllm"})
            assert "rocm_attn serves" not in said, "our backend has served"
            return [vars(answer) for answer in answers]

        requested = [VLLM, [self._words(run) for run in runs]]
        return [Answer(**each) for each in kept_answers(self.folder, requested, stock_answers)]

    def environment(self) -> dict[str, str]:
        """Returns the variables of vLLM's processes, which find our plug-in."""
        return {
            **environment_without_settings(),
            "PYTHONPATH": os.pathsep.join(map(str, python_path(self.plugin))),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def _words(self, run: Run) -> dict[str, Any]:
        """Returns a run with its models' names in place of their folders, which may be elsewhere the next time."""
        args = {**run.args, "model": Path(run.args["model"]).name}
        if drafts := args.get("speculative_config", {}).get("model"):
            args["speculative_config"] = {**args["speculative_config"], "model": Path(drafts).name}
        return {**vars(run), "args": args}

    def _answers(self, runs: Sequence[Run], scratch: Path, settings: dict[str, str]) -> tuple[list[Answer], str]:
        """Returns the answers, and all that vLLM has logged."""
        request, out = scratch / "request.json", scratch / "answers.json"
        request.write_text(json.dumps([vars(run) for run in runs]))
        # Two ranks get one core each: otherwise vLLM finds no place for them.
        ranks = max(
            math.prod(run.args.get(f"{each}_parallel_size", 1) for each in ("tensor", "pipeline")) for run in runs
        )
        cores = "auto" if ranks == 1 else "|".join(map(str, range(ranks)))
        environment = {**self.environment(), "VLLM_CPU_OMP_THREADS_BIND": cores, **settings}
        command = [str(self.python), "-m", "tests.amd.engines.vllm_text", str(request), str(out)]
        with (scratch / "log").open("w+") as log:
            done = subprocess.run(command, cwd=scratch, env=environment, stdout=log, stderr=log, check=False)
            log.seek(0)
            said = log.read()
        assert done.returncode == 0, said[-6000:]
        return [Answer(**each) for each in json.loads(out.read_text())], said


def vllm_venv(plugin: Path) -> VllmVenv:
    """Returns the environment, or skips the test with a message that says what to do.

    plugin: an empty folder, which receives the metadata that an installation of this checkout has
    """
    found = VllmVenv(engine_folder("vllm"), plugin)
    write_metadata(plugin, _ENTRY_POINTS)
    return found
