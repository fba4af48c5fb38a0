"""Runs of vllm_text in vLLM's own virtual environment, which ENGINE_VENVS names: FOLDER/vllm.

`bash scripts/engine_venv.sh vllm` makes it. The answers of vLLM's own backend do not depend on this project, and are
kept next to it for the next time.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.amd.engines.serving import NO_SETTINGS, EngineVenv, kept_answers
from tests.amd.engines.vllm_text import BATCH_INVARIANT, Answer, Run

# The release in the environment.
VLLM = "0.32.0"


class VllmVenv(EngineVenv):
    ENGINE = "vllm"
    ENTRY_POINTS = """[vllm.general_plugins]
rocm_attn = rocm_attn.integrations.vllm:register
shared_slots = tests.amd.engines.vllm_cpu_ranks:register
states = tests.amd.engines.vllm_cpu_states:register
images = tests.amd.engines.vllm_images:register
"""

    def ours(
        self,
        runs: Sequence[Run],
        scratch: Path,
        *,
        release: str = VLLM,
        watches_states: bool = False,
        batch_invariant: bool = False,
        more: Mapping[str, str] = NO_SETTINGS,
    ) -> list[Answer]:
        """Returns the answers of our backend, in the place of vLLM's own ones.

        watches_states:  whether the plug-in checks vLLM's recurrent states
        batch_invariant: whether attention has the same bits in any batch
        more:            other settings of the environment
        """
        own = {"ROCM_ATTN_WATCH_STATES": str(int(watches_states)), BATCH_INVARIANT: str(int(batch_invariant))}
        settings = {"ROCM_ATTN_TAKE_BACKENDS": "CPU_ATTN,CPU_MLA", **own, **more}
        if release != VLLM:
            settings |= {"VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": self.python_path(release)}
        answers, said = self._answers(runs, scratch, settings)
        assert f"rocm_attn serves vLLM {release}" in said, "our backend did not serve"
        return answers

    def stock(self, runs: Sequence[Run], scratch: Path) -> list[Answer]:

        def stock_answers() -> list[dict[str, Any]]:
            answers, said = self._answers(runs, scratch, {"ROCM_ATTN_DISABLE_PLUGINS": "vllm"})
            assert "rocm_attn serves" not in said, "our backend has served"
            return [vars(answer) for answer in answers]

        requested = [VLLM, [self._words(run) for run in runs]]
        return [Answer(**each) for each in kept_answers(self.folder, requested, stock_answers)]

    def environment(self) -> dict[str, str]:
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        return {**super().environment(), **settings}

    def _words(self, run: Run) -> dict[str, Any]:
        """Returns a run with its models' names in place of their folders, which may be elsewhere the next time."""
        args = {**run.args, "model": Path(run.args["model"]).name}
        if drafts := args.get("speculative_config", {}).get("model"):
            args["speculative_config"] = {**args["speculative_config"], "model": Path(drafts).name}
        return {**vars(run), "args": args}

    def _answers(self, runs: Sequence[Run], scratch: Path, settings: dict[str, str]) -> tuple[list[Answer], str]:
        # Two ranks get one core each: otherwise vLLM finds no place for them.
        ranks = max(
            math.prod(run.args.get(f"{each}_parallel_size", 1) for each in ("tensor", "pipeline")) for run in runs
        )
        cores = "auto" if ranks == 1 else "|".join(map(str, range(ranks)))
        settings = {"VLLM_CPU_OMP_THREADS_BIND": cores, **settings}
        answers, said = self.call("tests.amd.engines.vllm_text", [vars(run) for run in runs], scratch, settings)
        return [Answer(**each) for each in answers], said
