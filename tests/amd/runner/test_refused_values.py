"""Options, requests and samplings without sense are refused in one sentence, before anything has them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocm_attn.errors import BadRequest, BadSetting
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from rocm_serve.sampling.sampling import Sampler
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.text.constraint import Constraint

NAN = math.nan


def request(**fields: Any) -> Request:
    return Request(**{"prompt_token_ids": (1,), "max_new_tokens": 8, **fields})


@pytest.mark.parametrize(
    ("make", "values", "sentence"),
    [
        (Sampling, {"temperature": NAN}, "temperature is nan"),
        (Sampling, {"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
        (Sampling, {"top_k": -1}, "top_k is -1; it must be at least 0"),
        (Sampling, {"min_p": 1.5}, "min_p is 1.5; it must be at least 0 and at most 1"),
        (Sampling, {"presence_penalty": NAN}, "presence_penalty is nan; it must be a finite number"),
        (Sampling, {"repetition_penalty": 5e-324}, "repetition_penalty is 5e-324; it must be at least 0.01"),
        (Sampling, {"logit_bias": ((1, 200.0),)}, "logit_bias of token 1 is 200.0"),
        (Sampling, {"logit_bias": ((1, 2.0), (1, 3.0))}, "logit_bias has a token twice"),
        (Sampling, {"logit_bias": tuple((token, 1.0) for token in range(1025))}, "logit_bias has 1025 tokens"),
        (request, {"min_tokens": 9}, "min_tokens is 9; it must be at least 0 and at most 8, the most new tokens"),
        (request, {"logprobs": 21}, "logprobs is 21; it must be -1"),
        (request, {"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be -1"),
        (request, {"stop": ("",)}, "has 0 characters"),
        (request, {"ignore_eos": "no"}, "ignore_eos is 'no'; it must be True or False"),
        (request, {"detokenise": None}, "detokenise is None; it must be True or False"),
        (request, {"prompt_token_ids": np.array([1, 2])}, "the prompt is a ndarray; give a tuple of token ids"),
        (request, {"prompt_token_ids": None}, "the prompt is a NoneType; give a tuple of token ids"),
        (Sampling, {"logit_bias": {1: 2.0}}, "give pairs of a token id and its bias"),
        (Sampling, {"logit_bias": ((1, 2.0, 3.0),)}, "give pairs of a token id and its bias"),
        (Sampling, {"logit_bias": None}, "give pairs of a token id and its bias"),
        (Sampling, {"logit_bias": (1, 2)}, "give pairs of a token id and its bias"),
        (Sampling, {"logit_bias": (([1], 2.0),)}, r"a token of logit_bias is \[1\]; it must be a whole number"),
        (Constraint.regex, {"pattern": None}, "text is None; it must be a text"),
        (Constraint, {"kind": "json", "text": "{}"}, "kind is 'json'; it must be one of json_schema, regex, lark"),
        (Constraint.choice, {"texts": "yes"}, "a choice needs at least one text, .*; give a list of them"),
        (
            Constraint.choice,
            {"texts": (text for text in ("a", "b"))},
            "a choice needs at least one text, .*; give a list of them",
        ),
        (Constraint.choice, {"texts": ["a", 1]}, "a choice needs at least one text, .*; give a list of them"),
        (request, {"constraint": "a+"}, "constraint is a str; it must be of type Constraint"),
        (request, {"stop": ("a" * 1025,)}, "has 1025 characters"),
        (request, {"stop": ("a",) * 65}, "stop has 65 texts"),
        (request, {"stop": "abc"}, "give a tuple of texts"),
        (
            request,
            {"stop": ("a\ud800",)},
            "character 2 of a text of stop is the surrogate U[+]D800, half of a character",
        ),
        (request, {"stop": (b"a",)}, "stop has b'a'; give a tuple of texts"),
        (Sampling, {"logit_bias": ((1, "2"),)}, "logit_bias of token 1 is '2'"),
        (Sampling, {"seed": 1.5}, r"seed is 1\.5; it must be a whole number"),
        (Sampling, {"top_k": True}, "top_k is True; it must be a whole number"),
        (Sampling, {"temperature": "1"}, "temperature is '1'; it must be a finite number"),
        (Sampling, {"temperature": 10**400}, "temperature is 1000"),
        (Sampling, {"min_p": None}, "min_p is None; it must be a finite number"),
        (Sampling, {"presence_penalty": 10**400}, "it must be a finite number"),
        (request, {"max_new_tokens": 1.5}, r"max_new_tokens is 1\.5; it must be a whole number"),
        (request, {"priority": None}, "priority is None; it must be a whole number"),
        (request, {"logprobs": True}, "logprobs is True; it must be a whole number"),
        (request, {"cache_salt": None}, "cache_salt is None; it must be a text"),
        (request, {"sampling": None}, "sampling is None; it must be a Sampling"),
        (request, {"stop_token_ids": [3]}, r"stop_token_ids is \[3\]; give a tuple of token ids"),
        (EngineOptions, {"chunk": "16"}, "chunk is '16'; it must be a whole number"),
        (EngineOptions, {"kv_bytes": 1e9}, "kv_bytes is 1000000000.0; it must be a whole number"),
        (EngineOptions, {"graphs": "off"}, "graphs is 'off'; it must be True or False"),
        (EngineOptions, {"latency": "5"}, "latency is '5'; it must be a finite number"),
        (EngineOptions, {"speculative": None}, "speculative is None; it must be a text"),
        (EngineOptions, {"speculative": "other"}, "speculative 'other' is not known; give off, ngram, draft:MODEL"),
        (EngineOptions, {"speculative": "ngram", "topk": 5}, "topk is 5 and draft_tokens is 4"),
        (EngineOptions, {"draft_tokens": 0}, "draft_tokens is 0; it must be at least 1"),
        (EngineOptions, {"sampled_drafts": True, "speculative": "ngram"}, "it needs a small model or an EAGLE head"),
        (EngineOptions, {"draft_tokens": 3}, "draft_tokens is 3 and speculative is off, so there are no draft tokens"),
        (EngineOptions, {"topk": 2}, "topk is 2 and speculative is off, so there are no draft tokens"),
        (EngineOptions, {"sampled_drafts": True}, "or leave sampled_drafts out"),
        (EngineOptions, {"steps_ahead": 2}, "steps_ahead is 2; it must be"),
        (EngineOptions, {"num_pages": 9, "kv_bytes": 1}, "each says how large the pool is; leave one of them out"),
        (EngineOptions, {"gpu_memory_share": 0}, "gpu_memory_share is 0; it must be above 0 and at most 1"),
        (EngineOptions, {"latency": NAN}, "latency is nan; it must be a finite number"),
        (EngineOptions, {"latency": math.inf}, "latency is inf; it must be a finite number"),
        (EngineOptions, {"num_pages": 1}, "num_pages is 1; it must be at least 2"),
        (EngineOptions, {"max_kv_len": 1}, "max_kv_len is 1; it must be at least 2"),
        (
            EngineOptions,
            {"flight_record": Path("last"), "evidence": Path("last").absolute()},
            "flight_record and evidence are both .*last, and each would replace the other; name two files",
        ),
        (EngineOptions, {"flight_record": "last"}, "flight_record is 'last'; it must be a pathlib.Path"),
        (EngineOptions, {"hang_after": -0.5}, r"hang_after is -0\.5; it must be at least 0"),
        (
            EngineOptions,
            {"host_kv_bytes": 4096, "prefix_caching": False},
            "host_kv_bytes is 4096 and prefix_caching is off",
        ),
        (
            EngineOptions,
            {"host_kv_bytes": 4096, "speculative": "eagle:seeded"},
            "speculative is eagle:seeded, which keeps K and V of its own",
        ),
    ],
)
def test_a_value_without_sense_is_refused(make: Callable[..., object], values: dict[str, Any], sentence: str) -> None:
    with pytest.raises((BadRequest, BadSetting), match=sentence):
        make(**values)


def test_a_draw_of_a_negative_place_is_refused_also_after_others() -> None:
    """It was the last number that had been drawn."""
    sampler = Sampler(Sampling(temperature=1.0))
    sampler.next_draw()
    for draw in (sampler.draw, sampler.draft_number_at, sampler.accept_at):
        with pytest.raises(BadSetting, match="place is -1; the new tokens of a request are counted from 0"):
            draw(-1)


@pytest.mark.filterwarnings("error")
def test_a_number_of_numpy_is_taken_without_a_warning() -> None:
    assert Sampling(temperature=np.float32(0.5)).temperature == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_bytes", np.int32(1 << 30)), ("chunk", np.int32(16)), ("gpu_memory_share", np.float16(0.5))],
)
def test_an_options_number_of_numpy_becomes_pythons(name: str, value: Any) -> None:
    """Memory in bytes wrapped around to 0, and a step ended with an OverflowError."""
    taken = getattr(EngineOptions(**{name: value}), name)
    assert (taken, type(taken)) == (value, type(value.item()))


def test_a_requests_number_of_numpy_becomes_pythons() -> None:
    """An answer of up to 250 tokens ended after one: the prompt's length was added in eight bits."""
    asked = request(max_new_tokens=np.uint8(250), priority=np.int8(-3), min_tokens=np.int16(2))
    numbers = asked.max_new_tokens, asked.priority, asked.min_tokens
    assert (numbers, set(map(type, numbers))) == ((250, -3, 2), {int})


def test_a_default_in_a_type_of_numpys_becomes_pythons_too() -> None:
    assert type(EngineOptions(draft_tokens=np.uint8(4)).draft_tokens) is int
