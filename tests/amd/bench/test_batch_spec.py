"""Batches as text and as traces: a written batch reads back equal, and errors point at mistakes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.errors import BadSetting
from rocm_lab.bench.batch_spec import BatchSpec, Group
from rocm_lab.bench.request_trace import read_step

groups = st.builds(
    Group,
    st.integers(1, 300),
    st.integers(1, 1 << 20) | st.integers(1, 64).map(lambda k: k * 1024),
    st.integers(0, 1 << 20) | st.integers(0, 64).map(lambda k: k * 1024),
)
batches = st.lists(groups, min_size=1, max_size=6).map(lambda found: BatchSpec(tuple(found)))


@given(batches)
def test_what_is_printed_is_read_again(batch: BatchSpec) -> None:
    assert BatchSpec.parse(str(batch)) == batch


@given(batches)
def test_lengths_of_each_sequence_are_those_of_the_groups(batch: BatchSpec) -> None:
    again = BatchSpec.of_lengths((q, kv - q) for q, kv in zip(batch.q_len, batch.kv_len, strict=True))
    assert (again.q_len, again.kv_len) == (batch.q_len, batch.kv_len)
    assert (batch.num_seqs, batch.num_tokens) == (len(batch.q_len), sum(batch.q_len))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("64d4k", [(64, 1, 4095)]),
        ("1x2048+6144", [(1, 2048, 6144)]),
        ("63d4k+1x2048", [(63, 1, 4095), (1, 2048, 0)]),
        ("1x2k+6k+63d100+2x7", [(1, 2048, 6144), (63, 1, 99), (2, 7, 0)]),
        ("64x5+2500", [(64, 5, 2500)]),
        ("3x1+4095", [(3, 1, 4095)]),
        ("2d1", [(2, 1, 0)]),
    ],
)
def test_a_word_is_read(text: str, groups: list[tuple[int, int, int]]) -> None:
    assert BatchSpec.parse(text) == BatchSpec(tuple(Group(*group) for group in groups))


@pytest.mark.parametrize(
    ("text", "at"),
    [
        *((text, 1) for text in ("", "d4k", "64", "64d", "64d4q", "64d4k+", "0d4", "4d0", "4x0+7")),
        *((text, 1) for text in ("1d99999999999", "\u0664d4")),
        *((text, 8) for text in ("1x2048+6144 ", "1x2048+\u0664")),
        ("64d4k+100", 7),
        ("1x2048+6144+7", 13),
        ("2d1+1x+5", 5),
    ],
)
def test_a_mistake_is_pointed_at(text: str, at: int) -> None:
    with pytest.raises(BadSetting) as raised:
        BatchSpec.parse(text)
    message, line, pointer = str(raised.value).split("\n")
    assert f"{text[at - 1 :]!r}, from character {at} on, does not begin with sequences" in message
    assert line == f"  {text}"
    assert pointer.index("^") == at + 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1x2000000000+2000000000", "at most 2147483647 fit"),
        ("1000000d4+1000000d4", "more than 1048576 sequences"),
        ("1d2097152k", "at most 2147483647 fit"),
    ],
)
def test_what_no_device_holds_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(BadSetting, match=complaint):
        BatchSpec.parse(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.jsonl",
            '{"arrival_s": 1.0, "prompt_tokens": 7, "output_tokens": 1}\n'
            '{"arrival_s": 0.5, "prompt_tokens": 100, "output_tokens": 90}\n'
            '{"timestamp": 9000, "input_length": 5, "output_length": 2}\n',
        ),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,100,90\n"
            "2023-11-16 18:15:47,7,1\n2023-11-16 18:15:48,5,2\n",
        ),
    ],
)
def test_a_trace_is_a_step_in_which_its_requests_decode(name: str, text: str, tmp_path: Path) -> None:
    """Requests are in the order of arrival, each halfway through its answer: 100 + 44 stored and its new token."""
    (tmp_path / name).write_text(text)
    assert str(read_step(f"{tmp_path}/{name}")) == "1d145+1d8+1d6"
    assert str(read_step(f"{tmp_path}/{name}:2")) == "1d145+1d8"


def test_a_name_may_end_in_a_number(tmp_path: Path) -> None:
    request = '{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 1}\n'
    (tmp_path / "a:3.jsonl").write_text(request)
    (tmp_path / "a:3").write_text(2 * request)
    assert str(read_step(f"{tmp_path}/a:3.jsonl")) == "1d4"
    assert str(read_step(f"{tmp_path}/a:3")) == "2d4"
    assert str(read_step(f"{tmp_path}/a:3:1")) == "1d4"
    with pytest.raises(BadSetting, match=r"none\.csv cannot be read"):
        read_step(f"{tmp_path}/none.csv:2")
