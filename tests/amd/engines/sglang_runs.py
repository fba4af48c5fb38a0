"""Runs in SGLang's own virtual environment, which ENGINE_VENVS names: FOLDER/sglang.

`bash scripts/engine_venv.sh sglang` makes it. The answers of SGLang's own backend do not depend on this project, and
are kept next to it for the next time.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rocm_attn.machine.settings import WATCH_STATES
from tests.amd.engines.serving import (
    engine_folder,
    environment_without_settings,
    kept_answers,
    python_of,
    python_path,
    write_metadata,
)
from tests.amd.engines.sglang_kit import Tally
from tests.amd.engines.sglang_plugin import (
    BLOCKS,
    DETERMINISTIC,
    DRAFTS,
    FAULTS_LOG,
    HALVES_LOG,
    IMAGES,
    MODES_LOG,
    OVERLAP,
    RECURRENT,
    ROTATION,
    SPARSE,
    STATES_LOG,
    WINDOW_POOL,
)
from tests.amd.engines.sglang_text import Answer, Run

# The release in the environment.
SGLANG = "0.5.23"
_ENTRY_POINTS = """[sglang.srt.plugins]
rocm_attn = rocm_attn.integrations.sglang:register
engine_test = tests.amd.engines.sglang_plugin:register
"""


class SglangVenv:
    """A virtual environment with SGLang, and a folder for files made once. plugin: with our package's metadata"""

    def __init__(self, folder: Path, plugin: Path) -> None:
        self.folder, self.plugin = folder, plugin

    @property
    def python(self) -> Path:
        return python_of(self.folder, "sglang")

    def ours(
        self,
        runs: Sequence[Run],
        scratch: Path,
        *,
        name: str = "rocm_attn",
        window_pool: bool = False,
        release: str = SGLANG,
        asks: bool = True,
        watches_states: bool = False,
    ) -> list[Answer]:
        """Returns the answers of our backend, under its own name or one that it takes.

        asks:    true if the server's arguments name a backend; else SGLang chooses one itself
        release: another one than the environment's, run from a folder next to it with the environment's other packages
        """
        settings = {WINDOW_POOL: str(int(window_pool)), WATCH_STATES: str(int(watches_states))}
        if name != "rocm_attn":
            settings["ROCM_ATTN_TAKE_BACKENDS"] = name
        if release != SGLANG:
            tree = self.folder / "sglang" / f"python-{release}"
            assert (tree / "sglang").is_dir(), f"{tree} is missing: remove {self.folder / 'sglang'} and make it anew"
            settings["PYTHONPATH"] = os.pathsep.join(map(str, (tree, *python_path(self.plugin))))
        answers = self._answers(runs, name if asks else None, scratch, settings)
        assert f"rocm_attn serves SGLang {release}" in (scratch / "log").read_text(), "our backend did not serve"
        return answers

    def stock(self, runs: Sequence[Run], scratch: Path) -> list[Answer]:
        """Returns the answers of SGLang's own CPU backend. No faults of states are planted."""
        runs = [replace(run, state_faults=[]) for run in runs]

        def stock_answers() -> list[dict[str, Any]]:
            answers = self._answers(runs, "torch_native", scratch, {"ROCM_ATTN_DISABLE_PLUGINS": "sglang"})
            assert "rocm_attn serves" not in (scratch / "log").read_text(), "our backend has served"
            return [asdict(answer) for answer in answers]

        requested = [SGLANG, [self._words(run) for run in runs]]
        return [Answer(**each) for each in kept_answers(self.folder, requested, stock_answers)]

    def kit(self, groups: Sequence[str], scratch: Path) -> dict[str, Tally]:
        """Returns the results of SGLang's attention kit for our backend."""
        answered = self._call("tests.amd.engines.sglang_kit", list(groups), scratch, {})
        return {name: Tally(**tally) for name, tally in answered.items()}

    def environment(self) -> dict[str, str]:
        """Returns the variables of SGLang's processes on a CPU, which find our plug-in."""
        return {
            **environment_without_settings(),
            "PYTHONPATH": os.pathsep.join(map(str, python_path(self.plugin))),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "ROCM_ATTN_ON_FAULT": "raise",
        }

    def _words(self, run: Run) -> dict[str, Any]:
        """Returns a run with its model's name in place of its folder, which may be elsewhere the next time."""
        words = {**asdict(run), "engine": {**run.engine, "model_path": Path(run.engine["model_path"]).name}}
        del words["state_faults"]
        return words

    def _answers(
        self, runs: Sequence[Run], backend: str | None, scratch: Path, more: Mapping[str, str]
    ) -> list[Answer]:
        requested = [{**asdict(run), "engine": {**run.engine, "attention_backend": backend}} for run in runs]
        drafts = any("speculative_algorithm" in run.engine for run in runs)
        sparse = any(run.engine["model_path"].endswith("_sparse") for run in runs)
        rotation = any(run.engine["model_path"].endswith("llama4") for run in runs)
        blocks = any(run.engine.get("speculative_algorithm") == "DFLASH" for run in runs)
        images = any(run.engine["model_path"].endswith("_images") for run in runs)
        overlap = any(run.engine.get("enable_two_batch_overlap") for run in runs)
        deterministic = any(run.engine.get("enable_deterministic_inference") for run in runs)
        recurrent = any("mamba_radix_cache_strategy" in run.engine for run in runs)
        switches = {
            DRAFTS: drafts,
            SPARSE: sparse,
            ROTATION: rotation,
            IMAGES: images,
            BLOCKS: blocks,
            OVERLAP: overlap,
            DETERMINISTIC: deterministic,
            RECURRENT: recurrent,
        }
        settings = {
            **{name: str(scratch / name.lower()) for name in (FAULTS_LOG, MODES_LOG, HALVES_LOG, STATES_LOG)},
            **{name: str(int(is_on)) for name, is_on in switches.items()},
            "SGLANG_MAMBA_CONV_DTYPE": "float32",
            **more,
        }
        ranks = max(run.engine.get("tp_size", 1) for run in runs)
        if ranks > 1:  # one core per rank: otherwise SGLang requires a NUMA node for each
            settings["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
        return [Answer(**each) for each in self._call("tests.amd.engines.sglang_text", requested, scratch, settings)]

    def _call(self, module: str, requested: Any, scratch: Path, settings: Mapping[str, str]) -> Any:
        request, out = scratch / "request.json", scratch / "answers.json"
        request.write_text(json.dumps(requested))
        environment = {**self.environment(), **settings}
        with (scratch / "log").open("w+") as log:
            done = subprocess.run(
                [self.python, "-m", module, request, out],
                cwd=scratch,
                env=environment,
                stdout=log,
                stderr=log,
                check=False,
            )
            log.seek(0)
            said = log.read()
        assert done.returncode == 0, said[-6000:]
        return json.loads(out.read_text())


def sglang_venv(plugin: Path) -> SglangVenv:
    """Returns the environment, or skips the test with a message that says what to do.

    plugin: an empty folder, which receives the metadata that an installation of this checkout has
    """
    found = SglangVenv(engine_folder("sglang"), plugin)
    write_metadata(plugin, _ENTRY_POINTS)
    return found
