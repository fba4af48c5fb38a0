"""A small model whose tokens are characters, and requests that use every sampling option."""

from dataclasses import replace

from rocm_serve.models.loading import LoadedModel
from rocm_serve.ranks import ONE_RANK, Ranks
from rocm_serve.request import Request
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.text.constraint import Constraint
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner import serving
from tests.amd.runner.small_tokenizers import of_characters
from tests.amd.runner.tiny_model import tiny_model

CHARACTERS = '{}[]":, 0123456789abcdefghijklmnopqrstuvwxyz.-'
END = len(CHARACTERS)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
# Deterministic: a request's completion must not depend on the other requests in its steps.
BASE = replace(serving.BASE, provider="torch", chunk=12, max_kv_len=80, steps_ahead=0, deterministic=True)


def character_tokenizer() -> Tokenizer:
    """A token for each of CHARACTERS, in their order, and one that ends a text."""
    return Tokenizer(backend=of_characters(CHARACTERS), bos_token_id=None, chat_template=None)


def character_model(ranks: Ranks = ONE_RANK) -> LoadedModel:
    """The ids beyond the tokenizer's are of no text: a model may have more tokens than its tokenizer."""
    return tiny_model(tokenizer=character_tokenizer(), eos_token_ids=(END,), ranks=ranks)


def drawn(**requested: object) -> Sampling:
    return replace(Sampling(temperature=1.2, seed=4), **requested)  # type: ignore[arg-type]


PROMPT = (8, 9, 8, 10)
PLAIN = Request(PROMPT, 16)
ASKING = (
    Request(PROMPT, 16, logprobs=3),
    Request(PROMPT, 16, drawn(frequency_penalty=1.5), logprobs=0),
    Request(PROMPT, 16, Sampling(repetition_penalty=1.8, presence_penalty=0.5)),
    Request(PROMPT, 16, drawn(top_k=3, min_p=0.1)),
    Request(PROMPT, 16, drawn(logit_bias=((30, 9.0), (31, 9.0)), top_p=0.9)),
    Request(PROMPT, 16, drawn(), allowed_token_ids=(END, *range(20, 40))),
    Request(PROMPT, 16, Sampling(logit_bias=((END, 90.0),)), min_tokens=9),
    Request(PROMPT, 16, drawn(), stop=("rp", "never")),
)
CONSTRAINED = (
    Request(PROMPT, 40, drawn(), constraint=Constraint.json_schema(SCHEMA), logprobs=1),
    Request(PROMPT, 40, drawn(frequency_penalty=0.3), constraint=Constraint.regex("[a-f]{4,9}[0-9]")),
    Request(PROMPT, 40, constraint=Constraint.choice(["yes", "no"]), min_tokens=20),
    Request(PROMPT, 9, drawn(), constraint=Constraint.regex("[a-z]+"), allowed_token_ids=tuple(range(9, 44, 2))),
)
