"""The request that the flags of `rocm-attn generate` describe."""

import argparse
from pathlib import Path

from rocm_attn.errors import BadRequest, BadSetting, reason_of
from rocm_serve.cli.options import SAMPLING
from rocm_serve.request import Request
from rocm_serve.sampling.logprobs import NO_LOGPROBS
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.text.constraint import Constraint


def request_of(options: argparse.Namespace) -> Request:
    """The request for every prompt, with a prompt of one token as a placeholder. Raises BadRequest, BadSetting.

    The seed is the same for each, so a completion does not depend on the other prompts.
    """
    for flag, asked in {"--logprobs": options.logprobs, "--prompt-logprobs": options.prompt_logprobs}.items():
        if asked != NO_LOGPROBS and not options.json:
            raise BadSetting(f"{flag} is printed only with --json; add --json")
    constraint = _constraint(options)
    if constraint is not None:
        constraint.check()
    return Request(
        prompt_token_ids=(0,),
        max_new_tokens=options.max_new_tokens,
        sampling=Sampling(**{name: getattr(options, name) for name in SAMPLING}),
        stop_token_ids=options.stop_token_ids,
        allowed_token_ids=options.allowed_token_ids,
        ignore_eos=options.ignore_eos,
        stop=tuple(options.stop),
        include_stop=options.include_stop,
        min_tokens=options.min_tokens,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        constraint=constraint,
    )


def _constraint(options: argparse.Namespace) -> Constraint | None:
    if options.json_schema is not None and options.regex is not None:
        raise BadRequest("--json-schema and --regex are both given; leave one of them out")
    if options.regex is not None:
        return Constraint.regex(options.regex)
    if options.json_schema is None:
        return None
    schema: str = options.json_schema
    if schema.lstrip().startswith("{"):
        return Constraint.json_schema(schema)
    try:
        return Constraint.json_schema(Path(schema).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadSetting(
            f"the JSON schema in {schema} cannot be read ({reason_of(error)}); give the schema itself, or a file that "
            "holds it"
        ) from error
