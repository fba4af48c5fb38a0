"""vLLM's whole engine on a GPU: our backend's text next to that of vLLM's own, in eager steps and in full graphs.

    python -m tests.amd.engines.vllm_gpu FOLDER [GROUP...]

FOLDER: keeps models, and vLLM's log of each engine. Each engine has a process of its own, because vLLM keeps one memory
pool for all graphs of a process; all run at once. vLLM is that of the interpreter, and our plug-in is installed. The
program prints a line for each engine, and fails if a text differs or a fault is not reported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from tests.amd.engines.models import model
from tests.amd.engines.serving import MOST_STEPS_LATER, prompts
from tests.amd.engines.vllm_models import vllm_model
from tests.amd.engines.vllm_text import FAULTS, GRAPH_FAULTS, Answer, Run, moved_table

STOCK = "TRITON_ATTN"
# Three requests are padded to four sequences.
_SIZES = (4, 8, 16, 32, 48)


@dataclass(frozen=True)
class Engines:
    """The runs of a group.

    runs:     name -> run; the texts of the others are compared with the first one's
    settings: environment of all but the first one
    exact:    true if texts must be equal; with two-byte dtypes only the equal ones are counted
    """

    runs: Mapping[str, Run]
    settings: Mapping[str, str] = field(default_factory=dict)
    exact: bool = True


def in_mode(mode: str) -> dict[str, Any]:
    """Returns arguments of vllm.LLM for eager steps, or for full graphs of vLLM's mode."""
    if mode == "eager":
        return {}
    graphs = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": list(_SIZES)}
    return {"enforce_eager": False, "compilation_config": graphs}


def run(folder: Path, backend: str, mode: str = "eager", fault: str = "", **more: Any) -> Run:
    args = {
        "model": str(folder),
        "attention_backend": backend,
        "block_size": 16,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 48,
        "enable_chunked_prefill": True,
        "kv_cache_memory_bytes": 1 << 28,
        "gpu_memory_utilization": 0.05,
        **in_mode(mode),
        **more,
    }
    return Run(args, [prompts()[3:6]] if fault else [prompts(), prompts()[-3:]], 24, fault)


def llama(cache: Path) -> Engines:
    folder = vllm_model("llama", cache)
    modes = ("eager", "FULL", "FULL_DECODE_ONLY")
    return Engines({STOCK: run(folder, STOCK), **{mode: run(folder, "CUSTOM", mode) for mode in modes}})


def gemma3(cache: Path) -> Engines:
    folder = model("gemma3", cache)
    modes = ("eager", "FULL", "FULL_DECODE_ONLY")
    return Engines({STOCK: run(folder, STOCK), **{mode: run(folder, "CUSTOM", mode) for mode in modes}})


def faults(cache: Path) -> Engines:
    """Returns runs with a fault in the fifth step, which decodes."""
    folder = model("gemma3", cache)
    return Engines({name: run(folder, "CUSTOM", "FULL_DECODE_ONLY", name) for name in (*FAULTS, *GRAPH_FAULTS)})


def latent(cache: Path) -> Engines:
    """Returns runs whose prompts use FlashAttention, which vLLM has only in two bytes."""
    folder, name = model("deepseek_wide", cache), "TRITON_MLA"
    modes = ("eager", "FULL_DECODE_ONLY")
    ours = {mode: run(folder, name, mode, dtype="bfloat16") for mode in modes}
    stock = {name: run(folder, name, dtype="bfloat16")}
    return Engines(stock | ours, {"ROCM_ATTN_TAKE_BACKENDS": name}, exact=False)


def ranks(cache: Path) -> Engines:
    """Returns runs on two GPUs that share out heads, and contexts."""
    folder = vllm_model("llama", cache)
    two: dict[str, Any] = {"tensor_parallel_size": 2}
    runs = {
        STOCK: run(folder, STOCK),
        "two ranks, eager": run(folder, "CUSTOM", **two),
        "two ranks, FULL": run(folder, "CUSTOM", "FULL", **two),
        "two ranks share contexts": run(folder, "CUSTOM", decode_context_parallel_size=2, **two),
    }
    return Engines(runs)


def latent_ranks(cache: Path) -> Engines:
    """Returns runs on two GPUs that share the contexts of latent layers, whose prompts vLLM gathers itself."""
    folder, name = model("deepseek_wide", cache), "TRITON_MLA"
    two: dict[str, Any] = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    runs = {
        name: run(folder, name, dtype="bfloat16"),
        "one rank": run(folder, name, dtype="bfloat16"),
        "two ranks share contexts": run(folder, name, dtype="bfloat16", **two),
    }
    return Engines(runs, {"ROCM_ATTN_TAKE_BACKENDS": name}, exact=False)


GROUPS: Mapping[str, Callable[[Path], Engines]] = {
    each.__name__: each for each in (llama, gemma3, faults, latent, ranks, latent_ranks)
}
_ONE_GPU = ("llama", "gemma3", "faults")


class Process:
    def __init__(self, scratch: Path, requested: Run, more: Mapping[str, str]) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self.requested, self._log, self._answers = requested, scratch / "log", scratch / "answers.json"
        # An earlier run may have left answers in the same folder.
        self._answers.unlink(missing_ok=True)
        request = scratch / "request.json"
        request.write_text(json.dumps([asdict(requested)]))
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_CACHE_ROOT": str(scratch),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # Otherwise TRITON_ATTN multiplies float32 numbers in TF32, which changes tokens.
            "TRITON_F32_DEFAULT": "ieee",
            **more,
        }
        command = [sys.executable, "-m", "tests.amd.engines.vllm_text", str(request), str(self._answers)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log)

    def answer(self) -> Answer | None:
        self._process.wait()
        if not self._answers.is_file():
            return None
        (answer,) = json.loads(self._answers.read_text())
        return Answer(**answer)

    def said(self) -> str:
        return self._log.read_text()[-3000:]


def main(folder: Path, groups: Sequence[str]) -> int:
    """Runs groups, prints their results, and returns the number of engines that were wrong."""
    requested = {name: GROUPS[name](folder) for name in groups}
    processes = {
        name: {
            engine: Process(folder / name / str(number), run, engines.settings if number else {})
            for number, (engine, run) in enumerate(engines.runs.items())
        }
        for name, engines in requested.items()
    }
    return sum(compared(name, engines, requested[name].exact) for name, engines in processes.items())


def compared(group: str, engines: Mapping[str, Process], exact: bool) -> int:
    """Prints a line for each engine of a group, and returns the number of wrong ones."""
    wrong, first = 0, next(iter(engines.values())).answer()
    for name, process in engines.items():
        answer = process.answer()
        if answer is None:
            is_right, said = False, f"it failed\n{process.said()}"
        elif process.requested.fault:
            if process.requested.fault == moved_table.__name__:  # refused before its step is begun
                is_right = answer.said.startswith("WrongState: ") and answer.steps_later == -1
            else:
                is_reported = answer.said.startswith(f"DeviceFault: step {answer.faulty_step}: ")
                is_right = is_reported and 0 <= answer.steps_later <= MOST_STEPS_LATER
            said = f"{answer.steps_later} steps later: {answer.said or 'nothing was said'}"
        elif first is None:
            is_right, said = False, "the first engine failed, there is nothing to compare with"
        else:
            texts, first_ones = (list(chain.from_iterable(each.tokens)) for each in (answer, first))
            pairs = list(zip(texts, first_ones, strict=True))
            equal = sum(ours == theirs for ours, theirs in pairs)
            tokens = f"{sum(starting_alike(*pair) for pair in pairs)} of {sum(map(len, texts))} tokens"
            is_right = equal == len(texts) or not exact
            said = f"{equal} of {len(texts)} texts, {tokens} before the first that differs, {answer.steps} steps"
        print(f"{group}, {name}: {'' if is_right else 'WRONG: '}{said}", flush=True)
        wrong += not is_right
    return wrong


def starting_alike(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Returns the number of a text's tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True)))


if __name__ == "__main__":
    sys.exit(1 if main(Path(sys.argv[1]), sys.argv[2:] or _ONE_GPU) else 0)
