"""The sizes of steps follow from the model and the device: the arithmetic by hand, and an engine that keeps to it."""

import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.capture.step_times import NEVER, Matrices, StepBudget, StepTimes
from rocm_attn.machine.gpus import GPUS, Rates, published_rates
from rocm_attn.problem import Problem
from rocm_attn.recurrence import Recurrence
from rocm_serve import step_sizes
from rocm_serve.models.weight_bytes import matrices_of
from rocm_serve.options import EngineOptions
from rocm_serve.scheduled_step import PromptRoom
from rocm_serve.step_sizes import StepSizes, rates_of
from tests.amd.runner.metered_memory import MeteredMemory
from tests.amd.runner.tiny_model import CONFIG, tiny_model

# A key takes 2 x 2 x 64 x 2 = 512 bytes and 2 x 4 x (64 + 64) = 1024 operations.
LAYER = Problem(
    num_q_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=torch.bfloat16, page_size=16, scale=1.0
)
WINDOW = replace(LAYER, window_left=99)
# 10^9 parameters: 2 x 10^9 operations a token.
DENSE = Matrices(tables=10**8, shared=2 * 10**9, experts=0, chosen=1.0, itemsize=2)
RATES = Rates(bytes_per_s=1e12, flops_per_s=1e15)
TIMES = StepTimes(DENSE, [LAYER, WINDOW], RATES)


def test_a_decode_step_reads_the_weights_once_and_the_keys_of_each_sequence() -> None:
    keys = 512 * (1000 + 100) / 1e12  # a window of 100
    assert TIMES.decode(1, 1000) == pytest.approx(2e-3 + keys)
    assert TIMES.decode(64, 1000) == pytest.approx(2e-3 + 64 * keys)
    # From 1000 tokens on, multiplying takes longer than reading.
    assert TIMES.decode(2000, 1000) == pytest.approx(2000 * 2e9 / 1e15 + 2000 * keys)
    slow = replace(TIMES, rates=Rates(1e12, 1e12))
    assert slow.decode(1, 1000) == pytest.approx(2e-3 + 1024 * 1100 / 1e12)


def test_a_step_reads_and_writes_the_states_of_each_sequence() -> None:
    """A state of 2 x 64 x 32 float32, and k, change and decay of one token, each in whole vectors of 256 bytes."""
    gated = Recurrence(2, 2, 64, 32, torch.bfloat16)
    times = replace(TIMES, recurrent=[gated, gated])
    moved = 2 * 2 * (2 * 64 * 32 * 4 + 256 + 256 + 256)
    assert times.decode(3, 1000) - TIMES.decode(3, 1000) == pytest.approx(3 * moved / 1e12)
    assert times.prompt(10) - TIMES.prompt(10) == pytest.approx(moved / 1e12)
    assert times.prompt_tokens(3e-3, 64, 1000) < TIMES.prompt_tokens(3e-3, 64, 1000)


def test_a_prompts_step_multiplies_and_attends_to_half_of_its_keys_on_average() -> None:
    assert TIMES.prompt(10) == pytest.approx(2e-3 + 10 * 1024 * (5 + 5) / 1e15)
    assert TIMES.prompt(4096) == pytest.approx(4096 * 2e9 / 1e15 + 4096 * 1024 * (2048 + 100) / 1e15)


def test_of_experts_a_step_reads_those_that_its_tokens_choose() -> None:
    experts = Matrices(tables=5, shared=10, experts=80, chosen=0.25, itemsize=2)
    assert [experts.read(tokens) for tokens in (0, 1, 2)] == [10, 30, 10 + 80 * (1 - 0.75**2)]
    assert experts.read(10**6) == 90
    assert (experts.num_bytes, experts.flops) == (95, 30)


def test_prompts_get_the_time_that_decoding_leaves() -> None:
    keys = 8 * 512 * (512 + 100) / 1e12
    assert TIMES.prompt_tokens(10e-3, 8, 512) == int((10e-3 - keys) * 1e15 / 2e9) - 8
    # The weights are read in 2 ms: 1000 tokens are multiplied meanwhile.
    assert TIMES.prompt_tokens(0.0, 8, 512) == 1000 - 8
    assert TIMES.prompt_tokens(0.0, 2000, 512) == 64
    half = StepTimes(DENSE, [LAYER], RATES).doubles_after
    assert half * 1024 == pytest.approx(2e9, rel=1e-3)
    assert StepTimes(DENSE, [], RATES).doubles_after == NEVER


@given(
    latencies=st.tuples(st.floats(0.01, 1e4), st.floats(0.01, 1e4) | st.just(float("inf"))),
    most=st.integers(1, 512),
    chunk=st.sampled_from([0, 1, 300, 8192]),
    matrices=st.builds(
        Matrices,
        tables=st.just(0),
        shared=st.integers(1, 10**12),
        experts=st.integers(0, 10**12),
        chosen=st.floats(0.01, 1.0),
        itemsize=st.sampled_from([1, 2, 4]),
    ),
    rates=st.sampled_from([gpu.rates for gpu in GPUS.values()]),
)
def test_a_shorter_latency_never_gives_prompts_more_tokens(
    latencies: tuple[float, float], most: int, chunk: int, matrices: Matrices, rates: Rates
) -> None:
    times = StepTimes(matrices, [LAYER, WINDOW], rates)
    short, long = (StepBudget.chosen(times, most, chunk, latency) for latency in sorted(latencies))
    for shorter, longer in zip(short.beside, long.beside, strict=True):
        assert 1 <= shorter <= longer <= long.chunk
    assert short.chunk == long.chunk == (chunk or short.chunk)
    assert 2048 <= StepBudget.chosen(times, most).chunk <= 8192


@pytest.mark.parametrize("name", sorted(GPUS))
def test_without_a_latency_a_step_with_prompts_takes_two_and_a_half_that_decode_the_same(name: str) -> None:
    rates = GPUS[name].rates
    budget = StepBudget.chosen(StepTimes(DENSE, [LAYER, WINDOW], rates), 256)
    bytes_per_s, flops_per_s = rates.bytes_per_s * 2 / 3, rates.flops_per_s * 0.6
    for num in range(1, 257):
        keys = num * 512 * (512 + 100) / bytes_per_s
        alone = max(2e9 / bytes_per_s, num * 2e9 / flops_per_s) + keys
        with_prompts = (num + budget.tokens_beside(num)) * 2e9 / flops_per_s + keys
        assert 2.4 * alone < with_prompts <= 2.5 * alone
        if num in budget.latency_ms:
            assert budget.latency_ms[num] == pytest.approx(1e3 * with_prompts)
    assert list(budget.latency_ms) == [1, 32, 256]
    assert budget.tokens_beside(1000) == budget.tokens_beside(256)


def test_prompts_go_on_where_few_tokens_take_longer_than_their_steps_may() -> None:
    # A token chooses 1 of 100 experts, and prompts need all of them: those that take no time of their own are taken in.
    experts = Matrices(tables=0, shared=10**8, experts=10**11, chosen=0.01, itemsize=2)
    budget = StepBudget.chosen(StepTimes(experts, [LAYER], RATES), 4)
    free = (10**8 + 10**11) / (1e12 * 2 / 3) * (1e15 * 0.6) / experts.flops
    assert budget.beside == tuple(min(budget.chunk, int(free) - num) for num in (1, 2, 3, 4))
    slow = StepBudget.chosen(StepTimes(DENSE, [LAYER], Rates(1e15, 1e12)), 4)
    assert slow.beside == (64, 64, 64, 64)


def test_a_step_has_room_for_the_prompt_tokens_of_its_own_number_of_sequences() -> None:
    budget = StepBudget(8, 100, (5, 7, 9))
    assert [PromptRoom.beside(num, 3, budget).prompt_tokens for num in (0, 1, 2, 3, 8)] == [100, 5, 7, 9, 9]


def test_prompts_get_more_tokens_while_many_requests_wait() -> None:
    bending = StepBudget(8, 100, (7,), is_firm=False)
    waiting = {0: 7, 1: 7, 4: 10, 5: 14, 40: 100}
    assert {num: PromptRoom.beside(8, num, bending).prompt_tokens for num in waiting} == waiting
    assert {num: PromptRoom.beside(8, num, replace(bending, is_firm=True)).prompt_tokens for num in waiting} == (
        dict.fromkeys(waiting, 7)
    )
    assert PromptRoom.beside(0, 40, bending).prompt_tokens == 100


def test_a_latency_holds_however_many_wait_if_it_was_requested() -> None:
    assert StepBudget.chosen(TIMES, 64, latency_ms=20.0).is_firm
    assert not StepBudget.chosen(TIMES, 64).is_firm


@pytest.mark.parametrize("num", [1, 32, 200])
def test_a_step_takes_no_longer_however_far_its_prompt_is(num: int) -> None:
    """The floor of a step is reading the weights: with few tokens, attention has the rest of the time, not more."""
    times, stored = replace(TIMES, layers=[replace(LAYER, num_q_heads=32)] * 16), 0
    budget = StepBudget.chosen(times, 256)
    usual, seconds = times.expected, 2.5 * times.expected.decode(num, 512)
    q_lens = list[int]()
    while stored < 40_000:
        q_len = PromptRoom.beside(num, 1, budget).take(40_000 - stored, stored, 2**31)
        attention = q_len * usual._attention_flops(stored + q_len // 2) / usual.rates.flops_per_s
        assert usual.decode(num, 512, q_len) + attention < 1.02 * seconds
        stored += q_len
        q_lens.append(q_len)
    assert min(q_lens[:-1]) > 16


def test_a_latency_that_is_given_holds_for_any_number_of_sequences() -> None:
    budget = StepBudget.chosen(TIMES, 64, latency_ms=20.0)
    assert list(budget.latency_ms) == [1, 32, 64]
    assert all(19.9 < ms <= 20.0 for ms in budget.latency_ms.values())


def test_a_gpu_is_known_by_its_drivers_name_and_its_relatives_are_not() -> None:
    for said, name in (("AMD Instinct MI300X", "mi300x"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100")):
        assert published_rates(said) == GPUS[name].rates
    for said in ("NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 NVL", "AMD Radeon Graphics", ""):
        assert published_rates(said) is None


def test_what_has_no_published_rates_is_measured() -> None:
    measured = rates_of(torch.device("cpu"), torch.float32)
    assert measured.source == "measured"
    assert measured.bytes_per_s > 0 < measured.flops_per_s
    assert "measured" in replace(TIMES, rates=measured).lines(1)[0]


def test_on_a_cpu_steps_are_bounded_by_tokens_alone_unless_a_latency_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model()
    free = StepSizes.of(loaded, EngineOptions())
    assert free.budget == StepBudget(64, 512, (512,))
    assert (free.options.max_batch_size, free.options.chunk) == (64, 512)
    assert free.lines == (
        "up to 64 sequences at a time, in steps of up to 512 tokens; "
        "the time between tokens is not bounded (--latency)",
    )
    monkeypatch.setattr(step_sizes, "rates_of", lambda device, dtype: Rates(1e9, 1e9))
    bounded = StepSizes.of(loaded, EngineOptions(latency=5.0)).budget
    assert max(bounded.beside) < bounded.chunk
    assert 4.9 < bounded.latency_ms[1] <= 5.0


def test_options_that_are_given_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_sizes, "rates_of", lambda device, dtype: RATES)
    given_sizes = StepSizes.of(tiny_model(), EngineOptions(latency=7.0, chunk=33, max_batch_size=3))
    assert given_sizes.budget == replace(given_sizes.budget, max_batch_size=3, chunk=33, beside=(33, 33, 33))
    assert (given_sizes.options.max_batch_size, given_sizes.options.chunk) == (3, 33)


def test_as_many_sequences_run_as_k_and_v_have_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model()
    monkeypatch.setattr(gc, "collect", lambda: 0)  # what only garbage holds is free; here nothing is
    token_bytes = 2 * 2 * 2 * 8 * 4  # K and V, two layers, two heads of 8 elements in float32
    monkeypatch.setattr(step_sizes, "rates_of", lambda device, dtype: RATES)

    def most(room: int, kv_bytes: int | None = None) -> int:
        monkeypatch.setattr(step_sizes, "memory_of", lambda device: MeteredMemory(room))
        options = EngineOptions(latency=1.0, gpu_memory_share=1.0, kv_bytes=kv_bytes)
        return StepSizes.of(loaded, options).budget.max_batch_size

    assert [most(seqs * 1024 * token_bytes) for seqs in (1, 100, 1000)] == [8, 100, 256]
    assert most(0, kv_bytes=40 * 1024 * token_bytes) == 40


def test_the_matrices_of_a_config_are_counted_by_what_reads_them() -> None:
    counted = matrices_of(CONFIG, torch.float32, 1)
    assert counted.tables == 64 * 24 * 4
    assert counted.num_bytes == tiny_model().weights.num_bytes
    tied = matrices_of(replace(CONFIG, tied_embeddings=True), torch.float32, 1)
    assert (tied.tables, tied.shared) == (0, counted.shared)
