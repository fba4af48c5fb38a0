"""vLLM's whole engine: the tokens of greedy text, as JSON. Run by the interpreter of vLLM's environment.

    python -m tests.amd.engines.vllm_text REQUEST OUT

REQUEST: JSON, a list of the fields of Run; OUT: receives JSON, a list of the fields of Answer. The environment
determines which backend serves: vLLM finds our plug-in if the package's metadata is on the path.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from tests.amd.engines.vllm_cpu_states import zero_right_pages
from tests.amd.engines.vllm_state_faults import STATE_FAULTS, PlantedInStates


@dataclass
class Run:
    """One engine. args: of vllm.LLM; rounds: prompts of calls, one after the other; new_tokens: of each prompt

    asked: a key of ASKED, the kind of answer
    fault: a key of FAULTS, applied to the engine's fifth step, or one of STATE_FAULTS, applied to the first step from
           the fifth on that it fits, or CHANGED_HOST_MEMORY, applied after each round; empty: none
    """

    args: dict[str, Any]
    rounds: list[list[list[int]]]
    new_tokens: int
    fault: str = ""
    asked: str = "text"


@dataclass
class Answer:
    """tokens: of each prompt of each round; cached: tokens of its prompt from the prefix cache

    embeddings:  of each prompt of each round, if these were asked for

    steps:       of the engine, in all rounds; fewer if drafts were accepted
    drafts:      of each step, those of each request, whether accepted or not
    preemptions: requests that lost their blocks and began again

    said:        text of the error raised after a fault
    faulty_step: the number that our attention has given to the faulty step, captures included; -1: it was not begun
    steps_later: steps that were begun after the faulty one and before the error; -1: the faulty one was not begun
    """

    tokens: list[list[list[int]]] = field(default_factory=list)
    cached: list[list[int]] = field(default_factory=list)
    embeddings: list[list[list[float]]] = field(default_factory=list)
    steps: int = 0
    drafts: list[list[list[int]]] = field(default_factory=list)
    preemptions: int = 0
    said: str = ""
    faulty_step: int = -1
    steps_later: int = -1


def wrong_slot(common: Any) -> Any:
    """Sends the first new token to the second sequence's slot, or a page further."""
    slots = common.slot_mapping.clone()
    slots[0] = slots[1] if len(slots) > 1 else slots[0] + 16
    return replaced(common, slot_mapping=slots)


def lost_table(common: Any) -> Any:
    """Gives the first sequence the block table line of a sequence that has ended: null blocks."""
    table = common.block_table_tensor.clone()
    table[0] = 0
    return replaced(common, block_table_tensor=table)


def stale_length(common: Any) -> Any:
    """Gives the first sequence the length of one with many more tokens, past the blocks that it has."""
    lengths = common.seq_lens.clone()
    lengths[0] += 64
    return replaced(common, seq_lens=lengths)


def evicted_window(common: Any) -> Any:
    """Frees the first sequence's blocks up to one that its window still sees."""
    table, first = common.block_table_tensor.clone(), int(common.seq_lens[0]) - 2
    table[0, : 1 + first // 16] = 0
    return replaced(common, block_table_tensor=table)


def replaced(common: Any, **values: Any) -> Any:
    return replace(common, **values)


FAULTS: dict[str, Callable[[Any], Any]] = {
    each.__name__: each for each in (wrong_slot, lost_table, stale_length, evicted_window)
}
CHANGED_HOST_MEMORY = "changed_host_memory"
BATCH_INVARIANT, _SECOND_RUNNER = "VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER"
# The environment in which vLLM's runner V2 serves on a CPU, where its own kernels are interpreted.
SECOND_RUNNER: Mapping[str, str] = {_SECOND_RUNNER: "1", "TRITON_INTERPRET": "1", "ROCM_ATTN_PROVIDER": "torch"}
_FAULTY_STEP = 5
_BEGIN, _STEP, _PREEMPT, _PROPOSE, _SEND_OUT = "begin", "step", "_preempt_request", "propose", "send_out"


class Planted:
    """Applies a fault to the fifth step that a group begins, and counts the steps after it."""

    def __init__(self, fault: str) -> None:
        from rocm_attn.integrations.vllm import group

        self._group = group.KVGroup
        self._begin: Callable[..., Any] = group.KVGroup.begin
        self._fault = FAULTS[fault]
        self.begun: dict[int, int] = {}
        self.faulty_step = -1
        planted = self

        def begin(group: Any, common: Any) -> Any:
            number = planted.begun[id(group)] = planted.begun.get(id(group), 0) + 1
            if number != _FAULTY_STEP:
                return planted._begin(group, common)
            step = planted._begin(group, planted._fault(common))
            planted.faulty_step = step.number
            return step

        setattr(self._group, _BEGIN, begin)

    @property
    def steps_later(self) -> int:
        """Number of steps between the faulty one and the one that was not begun."""
        return max(self.begun.values()) - _FAULTY_STEP - 1

    def next_round(self) -> None:
        """Changes nothing: these faults need no earlier request."""

    def undo(self) -> None:
        setattr(self._group, _BEGIN, self._begin)


class PlantedInHostMemory:
    """Changes a byte of every tenth block that has left for host memory."""

    faulty_step = steps_later = -1

    def __init__(self) -> None:
        from rocm_attn.integrations.host_blocks import HostBlocks

        self._blocks: Any = HostBlocks
        self._send_out: Callable[..., Any] = HostBlocks.send_out
        self._sent: list[Any] = []
        planted = self

        def send_out(blocks: Any, moved: Any) -> Any:
            planted._sent += [blocks._records.at(slot) for each in moved for slot in each.slots]
            return planted._send_out(blocks, moved)

        setattr(self._blocks, _SEND_OUT, send_out)

    def next_round(self) -> None:
        for record in self._sent[::10]:
            record[5] += 1
        self._sent.clear()

    def undo(self) -> None:
        setattr(self._blocks, _SEND_OUT, self._send_out)


@contextmanager
def counted_steps(found: Answer) -> Iterator[None]:
    """Counts the steps and preemptions of engines, and keeps drafts of heads.

    It keeps no reference to an engine, which would prevent its end.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    step, preempt, propose = LLMEngine.step, getattr(Scheduler, _PREEMPT), getattr(SpecDecodeBaseProposer, _PROPOSE)

    def counted(engine: Any) -> Any:
        found.steps += 1
        return step(engine)

    def preempted(scheduler: Any, *given: Any, **named: Any) -> Any:
        found.preemptions += 1
        return preempt(scheduler, *given, **named)

    def proposed(proposer: Any, *given: Any, **named: Any) -> Any:
        drafts = propose(proposer, *given, **named)
        found.drafts.append(drafts.tolist())
        return drafts

    setattr(SpecDecodeBaseProposer, _PROPOSE, proposed)
    setattr(LLMEngine, _STEP, counted)
    setattr(Scheduler, _PREEMPT, preempted)
    try:
        yield
    finally:
        setattr(SpecDecodeBaseProposer, _PROPOSE, propose)
        setattr(LLMEngine, _STEP, step)
        setattr(Scheduler, _PREEMPT, preempt)


def text_of_tokens(prompt: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": prompt}


def text_of_speech(prompt: list[int]) -> dict[str, Any]:
    """A prompt to a model of speech: sound that follows from the prompt, and the prompt for its decoder."""
    import numpy as np

    sound = np.random.default_rng(prompt).standard_normal(SAMPLES).astype(np.float32)
    return {
        "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (sound, SAMPLES)}},
        "decoder_prompt": {"prompt_token_ids": prompt},
    }


# Kind of answer -> the form of a prompt.
EMBEDDINGS = "embeddings"
ASKED: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "text": text_of_tokens,
    EMBEDDINGS: text_of_tokens,
    "speech": text_of_speech,
}
# Samples of a second of sound, and of each prompt's.
SAMPLES = 16000


def answer(run: Run) -> Answer:
    if os.environ.get(_SECOND_RUNNER) == "1":
        name_a_driver()
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    from rocm_attn.errors import RocmAttnError

    if os.environ.get(BATCH_INVARIANT) == "1":
        compute_all_here()
    if str(run.args.get("attention_backend", "")).endswith("_SPARSE"):
        from tests.amd.engines.vllm_cpu_sparse import give_indexer

        give_indexer()
    settings = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": run.asked == "text", **run.args}
    engine = LLM(disable_log_stats=True, **settings)
    if current_platform.is_cpu():
        zero_right_pages()
    sampling = SamplingParams(temperature=0, max_tokens=run.new_tokens, ignore_eos=True, detokenize=False)
    found = Answer()
    planted: Any = None
    if run.fault:
        planted = _planted(run.fault)
    try:
        for prompts in run.rounds:
            requested = [ASKED[run.asked](prompt) for prompt in prompts]
            if run.asked == EMBEDDINGS:
                embedded = engine.embed(requested, use_tqdm=False)
                found.embeddings.append([list(output.outputs.embedding) for output in embedded])
                continue
            with counted_steps(found):
                outputs = engine.generate(requested, sampling, use_tqdm=False)
            found.tokens.append([list(output.outputs[0].token_ids) for output in outputs])
            found.cached.append([output.num_cached_tokens or 0 for output in outputs])
            if planted is not None:
                planted.next_round()
                found.faulty_step = planted.faulty_step
    except (RuntimeError, RocmAttnError) as error:
        if planted is None:
            raise
        found.said = f"{type(error).__name__}: {error}"
        found.faulty_step, found.steps_later = planted.faulty_step, planted.steps_later
    finally:
        if planted is not None:
            planted.undo()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def name_a_driver() -> None:
    """Lets vLLM launch kernels in Triton's interpreter. Call it before the import of vLLM, which looks for a driver."""
    from triton.backends import backends

    backends["cpu"] = Mock()


def compute_all_here() -> None:
    """Fails where vLLM computes prompts of MLA layers itself, and leaves its products to torch.

    In batch-invariant mode vLLM multiplies by Triton kernels, which no CPU has.
    """
    from vllm.model_executor.determinism import batch_invariant
    from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl

    MLACommonImpl.forward_mha = Mock(side_effect=AssertionError("vLLM was to compute a prompt itself"))
    batch_invariant.init_batch_invariance = lambda *_: None


def _planted(fault: str) -> Any:
    if fault == CHANGED_HOST_MEMORY:
        return PlantedInHostMemory()
    return PlantedInStates(fault) if fault in STATE_FAULTS else Planted(fault)


if __name__ == "__main__":
    request, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps([asdict(answer(Run(**run))) for run in json.loads(request.read_text())]))
