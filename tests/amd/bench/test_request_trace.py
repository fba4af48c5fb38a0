"""Traces of requests: three public schemas, our own one, and made-up ones."""

import json
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, median

import pytest

from rocm_attn.cli import DONE, main
from rocm_attn.errors import BadSetting
from rocm_lab.bench.load import FIRST_TOKEN_ID, LoadOptions, prompts_of
from rocm_lab.bench.request_trace import PREFIX_BLOCK, RequestTrace, TracedRequest, read_trace
from rocm_lab.bench.traffic import Traffic

OWN = """\
{"arrival_s": 1.5, "prompt_tokens": 7, "output_tokens": 9}
{"arrival_s": 0.5, "prompt_tokens": 100, "output_tokens": 1}
"""
# The format of https://github.com/kvcache-ai/Mooncake.
MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2366]}
"""
# The format of https://github.com/Azure/AzurePublicDataset.
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2024-05-10 00:00:00.009930+00:00,879,55
"""


def trace_of(text: str, tmp_path: Path) -> RequestTrace:
    (tmp_path / "trace").write_text(text)
    return read_trace(tmp_path / "trace")


def test_the_own_schema_is_read_in_order_of_arrival_from_0(tmp_path: Path) -> None:
    trace = trace_of(OWN, tmp_path)
    assert trace.requests == (TracedRequest(0.0, 100, 1), TracedRequest(1.0, 7, 9))
    assert trace_of(trace.text(), tmp_path) == trace


def test_mooncakes_schema_has_milliseconds_and_shared_blocks(tmp_path: Path) -> None:
    trace = trace_of(MOONCAKE, tmp_path)
    first, second = trace.requests
    assert first.arrival_s == 0.0
    assert second.arrival_s == pytest.approx(3.053)
    assert (first.prompt_tokens, first.output_tokens, first.prefix) == (6955, 52, (46, 47, 48))
    one, two = prompts_of(trace, LoadOptions())
    assert (len(one), len(two)) == (6955, 6472)
    shared = next(place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    assert 2 * PREFIX_BLOCK <= shared < 2 * PREFIX_BLOCK + 5
    assert trace_of(trace.text(), tmp_path) == trace


def test_azures_schema_has_dates(tmp_path: Path) -> None:
    trace = trace_of(AZURE, tmp_path)
    assert [request.prompt_tokens for request in trace.requests] == [374, 396, 879]
    assert trace.requests[1].arrival_s == pytest.approx(4.314579)


def test_dates_may_have_a_zone_and_lack_parts_of_a_second(tmp_path: Path) -> None:
    """pandas writes no parts of a second where they are 0. Such a line among others ended in a traceback."""
    times = ("18:15:46.5+00:00", "18:15:47+00:00", "20:15:48.25+02:00", "18:15:49.0000000Z", "18:15:50", "18:15:51.5")
    lines = [f"2023-11-16 {time},1,2" for time in times]
    trace = trace_of("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *lines)), tmp_path)
    assert [request.arrival_s for request in trace.requests] == [0.0, 0.5, 1.75, 2.5, 3.5, 5.0]


def test_a_text_within_a_line_may_hold_any_other_end_of_a_line(tmp_path: Path) -> None:
    said = ', "said": "a\u2028b\u0085c\x7f"}\r\n'
    assert trace_of("\n" + OWN.replace("}\n", said), tmp_path) == trace_of(OWN, tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no requests"),
        ("{", "line 1 is not JSON"),
        ("{}", "line 1 has nothing"),
        ('{"arrival_s": 0}', "line 1 has arrival_s"),
        (OWN + '{"arrival_s": -1, "prompt_tokens": 7, "output_tokens": 9}', "line 3: it arrives at -1"),
        (OWN + '{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 9}', "line 3: prompt_tokens is 0"),
        (OWN + '{"arrival_s": 1, "prompt_tokens": 1.5, "output_tokens": 9}', "line 3: 1.5 is not a whole number"),
        (OWN + f'{{"arrival_s": {10**400}, "prompt_tokens": 1, "output_tokens": 9}}', "line 3: int too large"),
        (OWN + "[" * 100_000, "line 3 is not JSON"),
        (OWN + "[]", "line 3 is list"),
        ("a,b\n1,2\n", "line 1 is 'a,b'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "line 2 has the TIMESTAMP 'now'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,,2\n", "line 2: ContextTokens is ''"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n",
            "line 2: GeneratedTokens is None; it must",
        ),
        (f'TIMESTAMP,ContextTokens,GeneratedTokens\n"{"x" * 200_000}",1,2\n', "field larger than field limit"),
    ],
)
def test_a_file_that_is_no_trace_says_where(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=complaint):
        trace_of(text, tmp_path)


def test_a_trace_is_cut_and_hastened(tmp_path: Path) -> None:
    trace = trace_of(OWN, tmp_path)
    assert trace.first(1).requests == trace.requests[:1]
    assert [request.arrival_s for request in trace.faster(4).requests] == [0.0, 0.25]
    assert [request.arrival_s for request in trace.faster(float("inf")).requests] == [0.0, 0.0]


def test_made_up_requests_have_the_rate_and_the_lengths_that_are_asked_for() -> None:
    requests = Traffic(2000, 8.0, 500, 100).trace(seed=1).requests
    gaps = [after.arrival_s - before.arrival_s for before, after in pairwise(requests)]
    assert mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert median(request.prompt_tokens for request in requests) == pytest.approx(500, rel=0.1)
    assert median(request.output_tokens for request in requests) == pytest.approx(100, rel=0.1)
    assert Traffic(2000, 8.0, 500, 100).trace(seed=1).requests == requests
    assert Traffic(2000, 8.0, 500, 100).trace(seed=2).requests != requests


def test_made_up_requests_share_the_prefix_that_is_asked_for() -> None:
    trace = Traffic(5, 8.0, 3 * PREFIX_BLOCK, 10, spread=0.0, shared_tokens=2 * PREFIX_BLOCK).trace(seed=1)
    prompts = prompts_of(trace, LoadOptions(vocabulary=64))
    assert len({tuple(prompt[: 2 * PREFIX_BLOCK]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert min(map(min, prompts)) >= FIRST_TOKEN_ID
    assert max(map(max, prompts)) < 64


def test_requests_are_made_up_one_by_one_and_no_length_is_above_int32() -> None:
    """Memory was full before the first line, by all requests or by the blocks of one prompt."""
    requests = Traffic(2**31 - 1, 8.0, 2**31 - 1, 2**31 - 1, spread=10.0).requests(seed=1)
    assert {(each.prompt_tokens, each.prefix) for each in islice(requests, 100)} >= {(2**31 - 1, ())}
    assert max(each.output_tokens for each in islice(requests, 100)) == 2**31 - 1


def test_a_trace_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "traffic", "--requests", "3", "--rate", "2", "--seed", "5"]) == DONE
    text = capsys.readouterr().out
    assert [set(json.loads(line)) for line in text.splitlines()] == [
        {"arrival_s", "prompt_tokens", "output_tokens"}
    ] * 3
    assert len(trace_of(text, tmp_path).requests) == 3
