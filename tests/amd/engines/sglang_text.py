"""SGLang's whole engine on a CPU: the tokens of greedy text, as JSON. Run by the interpreter of SGLang's environment.

    python -m tests.amd.engines.sglang_text REQUEST OUT

REQUEST: JSON, a list of the fields of Run; OUT: receives JSON, a list of the fields of Answer
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.amd.engines import sglang_cpu_states
from tests.amd.engines.sglang_cpu_drafts import give_kernels
from tests.amd.engines.sglang_plugin import (
    DRAFTS,
    FAULTS_LOG,
    HALVES_LOG,
    MODES_LOG,
    RECURRENT,
    STATES_LOG,
    faults_of_states,
)

# SGLang's own processes import this module, too, before any SGLang module.
if os.environ.get(DRAFTS) == "1":
    give_kernels()
if os.environ.get(RECURRENT) == "1":
    sglang_cpu_states.give_kernels()


@dataclass
class Run:
    """One engine.

    engine:     arguments of sglang.Engine
    rounds:     prompts of calls, one after the other
    new_tokens: of each prompt
    faults:     true if the first round runs once more, with faults in its steps
    embeds:     true if the model embeds the prompts, and makes no text
    chances:    true if log probabilities are requested
    state_faults: a fault of states for each of the last rounds
    """

    engine: dict[str, Any]
    rounds: list[list[list[int]]]
    new_tokens: int
    faults: bool = False
    embeds: bool = False
    chances: bool = False
    state_faults: list[str] = field(default_factory=list)

    @property
    def hears(self) -> bool:
        """True if each prompt comes with sound."""
        return str(self.engine["model_path"]).endswith("speech")


@dataclass
class Answer:
    """The result of a run.

    tokens:   of each prompt of each round
    rows:     the embedding of each prompt of each round
    chances:  log probability of each token
    cached:   number of its prompt's tokens from the radix cache
    verified: number of steps that have verified its drafts
    faults:   as planted and reported
    modes:    of the steps that our backend has begun, each once; MIXED: of prompts and decodes; _GRAPH: replayed
    halves:   of each batch that was run in two: its mode, its sequences, and those of each half
    """

    tokens: list[list[list[int]]] = field(default_factory=list)
    rows: list[list[list[float]]] = field(default_factory=list)
    chances: list[list[list[float]]] = field(default_factory=list)
    cached: list[list[int]] = field(default_factory=list)
    verified: list[list[int]] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    halves: list[list[Any]] = field(default_factory=list)


def answer(run: Run) -> Answer:
    import sglang

    log, modes, halves, of_states = (Path(os.environ[name]) for name in (FAULTS_LOG, MODES_LOG, HALVES_LOG, STATES_LOG))
    for each in (log, modes, halves, of_states, faults_of_states(of_states)):
        each.unlink(missing_ok=True)
    if run.state_faults:
        faults_of_states(of_states).touch()
    engine = sglang.Engine(skip_tokenizer_init=True, device="cpu", disable_cuda_graph=True, **run.engine)
    found = Answer()
    sampling = {"temperature": 0, "max_new_tokens": run.new_tokens, "ignore_eos": True}
    faults = [""] * (len(run.rounds) - len(run.state_faults)) + run.state_faults
    for prompts, fault in zip(run.rounds, faults, strict=True):
        if run.state_faults:
            faults_of_states(of_states).write_text(fault)
        if run.embeds:
            found.rows.append(embedded(engine, prompts))
            continue
        # The test plug-in makes the sound, whatever its name.
        sound = ["sound"] * len(prompts) if run.hears else None
        outputs = engine.generate(
            input_ids=prompts, sampling_params=sampling, return_logprob=run.chances, audio_data=sound
        )
        found.tokens.append([output["output_ids"] for output in outputs])
        if run.chances:
            of_tokens = [output["meta_info"]["output_token_logprobs"] for output in outputs]
            found.chances.append([[chance for chance, *_ in each] for each in of_tokens])
        found.cached.append([output["meta_info"]["cached_tokens"] for output in outputs])
        found.verified.append([output["meta_info"].get("spec_verify_ct", 0) for output in outputs])
    if run.faults:
        log.touch()
        sound = ["sound"] * len(run.rounds[0]) if run.hears else None
        engine.generate(input_ids=run.rounds[0], sampling_params={**sampling, "max_new_tokens": 40}, audio_data=sound)
        found.faults = [json.loads(line) for line in lines(log)]
    if run.state_faults:
        found.faults = [json.loads(line) for line in lines(of_states)]
    found.modes = sorted({*lines(modes)})
    found.halves = [json.loads(line) for line in lines(halves)]
    engine.shutdown()
    return found


def embedded(engine: Any, prompts: list[list[int]]) -> list[list[float]]:
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    request = EmbeddingReqInput(input_ids=prompts)
    outputs = engine.loop.run_until_complete(engine.tokenizer_manager.generate_request(request, None).__anext__())
    return [output["embedding"] for output in outputs]


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.is_file() else []


if __name__ == "__main__":
    requested, out = map(Path, sys.argv[1:])
    runs = [Run(**each) for each in json.loads(requested.read_text())]
    out.write_text(json.dumps([asdict(answer(run)) for run in runs]))
