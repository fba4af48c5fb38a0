"""Runs in SGLang's own virtual environment, which ENGINE_VENVS names: FOLDER/sglang.

`bash scripts/engine_venv.sh sglang` makes it. The answers of SGLang's own backend do not depend on this project, and
are kept next to it for the next time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rocm_attn.machine.settings import WATCH_STATES
from tests.amd.engines.serving import NO_SETTINGS, EngineVenv, kept_answers
from tests.amd.engines.sglang_kit import Tally
from tests.amd.engines.sglang_plugin import (
    BLOCKS,
    DETERMINISTIC,
    DRAFTS,
    FAULTS_LOG,
    GRAPHS,
    HALVES_LOG,
    IMAGES,
    MODES_LOG,
    OVERLAP,
    RECURRENT,
    ROTATION,
    SPARSE,
    SPEECH,
    STATES_LOG,
    WINDOW_POOL,
)
from tests.amd.engines.sglang_text import Answer, Run

# The release in the environment.
SGLANG = "0.5.23"


class SglangVenv(EngineVenv):
    ENGINE = "sglang"
    ENTRY_POINTS = """[sglang.srt.plugins]
rocm_attn = rocm_attn.integrations.sglang:register
engine_test = tests.amd.engines.sglang_plugin:register
"""

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
        graphed: bool = False,
        more: Mapping[str, str] = NO_SETTINGS,
    ) -> list[Answer]:
        """Returns the answers of our backend, under its own name or one that it takes.

        asks:    true if the server's arguments name a backend; else SGLang chooses one itself
        graphed: whether steps that decode or verify drafts are captured and replayed
        more:    other settings of the environment
        """
        switches = {WINDOW_POOL: window_pool, WATCH_STATES: watches_states, GRAPHS: graphed}
        settings = {**{setting: str(int(is_on)) for setting, is_on in switches.items()}, **more}
        if name != "rocm_attn":
            settings["ROCM_ATTN_TAKE_BACKENDS"] = name
        if release != SGLANG:
            settings["PYTHONPATH"] = self.python_path(release)
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
        answered, _ = self.call("tests.amd.engines.sglang_kit", list(groups), scratch, {})
        return {name: Tally(**tally) for name, tally in answered.items()}

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "SGLANG_USE_CPU_ENGINE": "1", "ROCM_ATTN_ON_FAULT": "raise"}

    def _words(self, run: Run) -> dict[str, Any]:
        """Returns a run with its model's name in place of its folder, which may be elsewhere the next time."""
        words = {**asdict(run), "engine": {**run.engine, "model_path": Path(run.engine["model_path"]).name}}
        del words["state_faults"]
        return words

    def _answers(
        self, runs: Sequence[Run], backend: str | None, scratch: Path, more: Mapping[str, str]
    ) -> list[Answer]:
        requested = [{**asdict(run), "engine": {**run.engine, "attention_backend": backend}} for run in runs]
        switches = {
            DRAFTS: any("speculative_algorithm" in run.engine for run in runs),
            SPARSE: any(run.engine["model_path"].endswith("_sparse") for run in runs),
            ROTATION: any(run.engine["model_path"].endswith("llama4") for run in runs),
            IMAGES: any(run.engine["model_path"].endswith("_images") for run in runs),
            BLOCKS: any(run.engine.get("speculative_algorithm") == "DFLASH" for run in runs),
            OVERLAP: any(run.engine.get("enable_two_batch_overlap") for run in runs),
            DETERMINISTIC: any(run.engine.get("enable_deterministic_inference") for run in runs),
            SPEECH: any(run.hears for run in runs),
            RECURRENT: any("mamba_radix_cache_strategy" in run.engine for run in runs),
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
        answers, _ = self.call("tests.amd.engines.sglang_text", requested, scratch, settings)
        return [Answer(**each) for each in answers]
