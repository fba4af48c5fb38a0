"""SGLang's whole engine on a CPU: the tokens of greedy text, as JSON. Run by the interpreter of SGLang's environment.

    python -m tests.amd.engines.sglang_text REQUEST OUT

REQUEST: JSON, the fields of Request; OUT: receives JSON, the fields of Answer
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Request:
    """engine: arguments of sglang.Engine; rounds: prompts of calls, one after the other; new_tokens: of each prompt"""

    engine: dict[str, Any]
    rounds: list[list[list[int]]]
    new_tokens: int


@dataclass
class Answer:
    """tokens: of each prompt of each round; cached: tokens of its prompt that a radix hit gave"""

    tokens: list[list[list[int]]] = field(default_factory=list)
    cached: list[list[int]] = field(default_factory=list)


def main(request: Request) -> Answer:
    import sglang

    engine = sglang.Engine(skip_tokenizer_init=True, device="cpu", disable_cuda_graph=True, **request.engine)
    answer = Answer()
    sampling = {"temperature": 0, "max_new_tokens": request.new_tokens, "ignore_eos": True}
    for prompts in request.rounds:
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        answer.tokens.append([output["output_ids"] for output in outputs])
        answer.cached.append([output["meta_info"]["cached_tokens"] for output in outputs])
    engine.shutdown()
    return answer


if __name__ == "__main__":
    asked, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(asdict(main(Request(**json.loads(asked.read_text()))))))
