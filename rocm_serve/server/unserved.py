"""The parts of OpenAI's and similar APIs that this server has not: each is refused with its reason.

An answer that silently differs from the request is worse than none. Fields that change nothing in an answer are ignored
instead, as all unknown ones are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rocm_serve.server.api_errors import ApiError, bad_request


class Unserved(NamedTuple):
    """A field that is refused. why: in words; harmless: values with which it changes no answer"""

    why: str
    harmless: tuple[Any, ...]


_CALLS = "functions are given as tools here"
_IMAGES = "the model reads and writes text alone"
_TEMPLATES = "it is for /v1/chat/completions"
_MODERATION = "the server judges no texts; use a server of classifiers"
_VARIABLES = "variables of the model's template are given as chat_template_kwargs"
_SAMPLERS = "tokens are drawn by temperature, top_k, min_p and top_p"
_REASONING_BOUND = "reasoning has no bound of its own; lower max_tokens"
_BEAMS = "one answer is drawn for each choice, and beams are not searched"

# A field -> why it is refused.
FIELDS: Mapping[str, Unserved] = {
    "best_of": Unserved("n answers are drawn and all of them returned", (None, 1)),
    "suffix": Unserved("text is only continued at its end", (None, "")),
    "tools": Unserved("calls of functions need a conversation: use /v1/chat/completions", (None, [])),
    "tool_choice": Unserved("calls of functions need a conversation: use /v1/chat/completions", (None, "none", "auto")),
    "functions": Unserved(_CALLS, (None, [])),
    "function_call": Unserved(_CALLS, (None, "none", "auto")),
    "modalities": Unserved(_IMAGES, (None, ["text"])),
    "audio": Unserved(_IMAGES, (None,)),
    "prediction": Unserved("drafts come from the server's own --speculative", (None,)),
    "moderation": Unserved(_MODERATION, (None,)),
    "web_search_options": Unserved("the server reaches no other one", (None,)),
    "use_beam_search": Unserved(_BEAMS, (None, False)),
    "length_penalty": Unserved(_BEAMS, (None, 1, 1.0)),
    "early_stopping": Unserved(_BEAMS, (None, False)),
    "prompt_embeds": Unserved("prompts are texts or token ids", (None,)),
    "skip_special_tokens": Unserved("an answer's text never has special tokens", (None, True)),
    "spaces_between_special_tokens": Unserved("an answer's text never has special tokens", (None, True)),
    "truncate_prompt_tokens": Unserved("a prompt is never cut; shorten it", (None,)),
    "add_special_tokens": Unserved("send token ids to choose the tokens of a prompt", (None,)),
    "add_generation_prompt": Unserved(_TEMPLATES, (None, True)),
    "continue_final_message": Unserved(_TEMPLATES, (None, False)),
    "chat_template": Unserved(_TEMPLATES, (None,)),
    "chat_template_kwargs": Unserved(_TEMPLATES, (None, {})),
    "include_reasoning": Unserved("reasoning is always apart from the answer", (None, True)),
    "separate_reasoning": Unserved("reasoning is always apart from the answer", (None, True)),
    "documents": Unserved("the model's template writes the messages alone; put documents into them", (None, [])),
    "bad_words": Unserved("texts are not excluded; give their tokens a logit_bias of -100", (None, [])),
    "logits_processors": Unserved("the server runs no code of clients", (None, [])),
    "custom_logit_processor": Unserved("the server runs no code of clients", (None,)),
    "return_hidden_states": Unserved("answers have tokens and their logprobs alone", (None, False)),
    "return_tokens_as_token_ids": Unserved("logprobs name tokens by their texts and bytes", (None, False)),
    "return_token_ids": Unserved("answers have texts; their tokens are in logprobs", (None, False)),
    "return_prompt_token_ids": Unserved("answers have texts; POST /tokenize gives a prompt's tokens", (None, False)),
    "return_prompt_text": Unserved("POST /tokenize and /detokenize give a prompt's text", (None, False)),
    "logprob_token_ids": Unserved("logprobs are those of the likeliest tokens", (None, [])),
    "echo": Unserved("an answer repeats no message", (None, False)),  # of conversations: /v1/completions has it
    "input_ids": Unserved("token ids are the prompt of /v1/completions", (None, [])),
    "no_stop_trim": Unserved("include_stop_str_in_output means the same here", (None, False)),
    "stop_regex": Unserved("an answer ends at texts of stop alone", (None, [], "")),
    "repetition_detection": Unserved("an answer may repeat itself; use frequency_penalty", (None,)),
    "thinking": Unserved(_VARIABLES, (None,)),
    "thinking_token_budget": Unserved(_REASONING_BOUND, (None,)),
    "watermark": Unserved("answers are not marked", (None,)),
    "watermarking": Unserved("answers are not marked", (None, False)),
    "session_params": Unserved("the server keeps nothing of a request; send the whole prompt", (None, {})),
    "lora_path": Unserved("a server has one model, without adapters; merge them into its weights", (None,)),
    "kv_transfer_params": Unserved("KV stays in the server that computed it", (None,)),
    "ebnf": Unserved("grammars are given as structured_outputs here", (None,)),
    "structural_tag": Unserved("functions are given as tools here, and formats as structured_outputs", (None,)),
    # fields of llama.cpp
    "grammar": Unserved("grammars are given as structured_outputs here", (None, "")),
    "repeat_penalty": Unserved("repetition_penalty means the same here", (None, 1)),
    "n_predict": Unserved("max_tokens means the same here", (None, -1)),
    "typical_p": Unserved(_SAMPLERS, (None, 1)),
    "mirostat": Unserved(_SAMPLERS, (None, 0)),
    "xtc_probability": Unserved(_SAMPLERS, (None, 0)),
    "dry_multiplier": Unserved(_SAMPLERS, (None, 0)),
    # fields of gateways to many models
    "enable_thinking": Unserved(_VARIABLES, (None,)),
    "thinking_budget": Unserved(_REASONING_BOUND, (None,)),
    "reasoning": Unserved("the effort is given as reasoning_effort here", (None, {})),
}

_KEPT = "the server keeps no answers; send the earlier items in input"
_ELSEWHERE = "/v1/chat/completions has it"

# Likewise of /v1/responses, beyond those of FIELDS. They have another meaning in a conversation, or none.
OF_RESPONSES: Mapping[str, Unserved] = {
    "previous_response_id": Unserved(_KEPT, (None,)),
    "conversation": Unserved(_KEPT, (None,)),
    "store": Unserved("the server keeps no answers", (None, False)),
    "background": Unserved("the server keeps no answers; stream the answer if it is long", (None, False)),
    "include": Unserved("answers have no other parts", (None, [], ["reasoning.encrypted_content"])),
    "prompt": Unserved("OpenAI keeps the template that it names; write its text into instructions and input", (None,)),
    "truncation": Unserved("a prompt is never cut; shorten the input", (None, "disabled")),
    "context_management": Unserved("a prompt is never cut; shorten the input", (None, [])),
    "max_tool_calls": Unserved("it bounds tools that a server calls, and this server calls none", (None,)),
    "top_logprobs": Unserved(_ELSEWHERE, (None, 0)),
    "prompt_logprobs": Unserved(_ELSEWHERE, (None,)),
    "logprobs": Unserved(_ELSEWHERE, (None, False)),
    "n": Unserved(_ELSEWHERE, (None, 1)),
    "messages": Unserved("it is for /v1/chat/completions; give input", (None,)),
}

_EMBEDDINGS = "the server generates text, and gives no vectors or scores of texts; use a server of embeddings"
_ADAPTERS = "a server has one model, without adapters; merge them into its weights"
_FILES = "the server keeps nothing of a request; send each request by itself"

# Path, with all below it -> why nothing is there.
PATHS: Mapping[str, str] = {
    "/v1/embeddings": _EMBEDDINGS,
    "/pooling": _EMBEDDINGS,
    "/classify": _EMBEDDINGS,
    "/score": _EMBEDDINGS,
    "/v1/score": _EMBEDDINGS,
    "/rerank": _EMBEDDINGS,
    "/v1/rerank": _EMBEDDINGS,
    "/v2/rerank": _EMBEDDINGS,
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/v1/batches": _FILES,
    "/v1/files": _FILES,
    "/v1/messages": "this is another API's form; send the messages to /v1/chat/completions",
    "/v1/responses": "the server keeps no answer, so none can be read again or deleted; POST /v1/responses makes one",
    "/v1/conversations": _FILES,
    "/v1/threads": _FILES,
    "/v1/assistants": _FILES,
    "/v1/images": _IMAGES,
    "/v1/audio": _IMAGES,
    "/v1/realtime": _IMAGES,
    "/v1/fine_tuning": "the server trains no models; serve the weights of one that is trained",
    "/generate": "this is another API's form; send the prompt to /v1/completions",
    "/v1/moderations": _MODERATION,
}


def refuse_unserved(given: Mapping[str, Any], fields: Mapping[str, Unserved] = FIELDS) -> None:
    """Raises ApiError for a field that would change the answer. given: fields that a body has and its form has not"""
    for name, value in given.items():
        unserved = fields.get(name)
        if unserved is not None and value not in unserved.harmless:
            raise bad_request(f"not served: {name}; {unserved.why}; leave it out", name, code="unsupported_parameter")


def no_such_path(path: str) -> ApiError:
    """Returns the answer to a request for a path that is not served."""
    parents = (path[:end] for end in range(len(path), 0, -1) if end == len(path) or path[end] == "/")
    why = next((PATHS[parent] for parent in parents if parent in PATHS), None)
    if why is None:
        return ApiError(404, f"there is no {path}; GET /openapi.json lists the paths", code="not_found")
    return ApiError(404, f"not served: {path}; {why}", code="not_served")
