"""StepTimes: how long a model's steps take at least, by a device's rates; known before anything is loaded.

A step reads the weights once, whatever its tokens, or multiplies them with each token; the longer one counts. Each
sequence's keys are read too. Launches, norms and collectives take nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rocm_attn.machine.gpus import Rates
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.problem import UNLIMITED_WINDOW, Indexer, Problem

# The parts of a device's rates that steps are expected to reach.
REACHED_BYTES, REACHED_FLOPS = 2 / 3, 0.6
# The longest prompt whose chunks are bounded exactly; those of longer ones are bounded by going on like it.
LONG_PROMPT = 32768
# The tokens of the sequences, and of the prompt, for which times are told.
USUAL_LEN, PROMPT_LEN = 512, 2048
# A step without sequences that decode has a long prompt's tokens for this time: a prompt that comes later waits for it.
_CHUNK_SECONDS, _LEAST_CHUNK, MOST_CHUNK = 0.25, 2048, 8192
# Nobody sees tokens come later by less, and the host takes some of it for a step with prompts.
_LEAST_LATENCY_MS = 5.0
UNBOUNDED = math.inf
# Prompts go on however many sequences decode.
_FEWEST_TOKENS = 64
# Stands for a prompt whose later tokens take no longer than its first ones.
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Matrices:
    """A model's weights on one rank, in bytes.

    tables:   rows that are looked up
    shared:   multiplied with every token
    experts:  of all experts, of which a token takes the part `chosen`
    itemsize: of an element
    """

    tables: int
    shared: int
    experts: int
    chosen: float
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return self.tables + self.shared + self.experts

    def read(self, num_tokens: int) -> float:
        """Bytes that a step reads. Each token chooses its experts by itself."""
        return self.shared + self.experts * (1 - (1 - self.chosen) ** num_tokens)

    @property
    def flops(self) -> float:
        """Operations of a token."""
        return 2 * (self.shared + self.experts * self.chosen) / self.itemsize


NOT_COUNTED = Matrices(0, 0, 0, 0.0, 1)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one rank's steps, in seconds.

    layers: one for each layer that attends; several may read the same K and V
    rates:  of the device
    """

    matrices: Matrices
    layers: Sequence[Problem]
    rates: Rates

    @property
    def expected(self) -> StepTimes:
        """The times by the parts of the rates that steps are expected to reach."""
        of = self.rates
        reached = Rates(of.bytes_per_s * REACHED_BYTES, of.flops_per_s * REACHED_FLOPS, of.source)
        return replace(self, rates=reached)

    def decode(self, num_seqs: int, kv_len: int) -> float:
        """A step of sequences of kv_len tokens that get one more each."""
        return self._matrices(num_seqs) + num_seqs * self._keys(kv_len)

    def prompt(self, num_tokens: int) -> float:
        """A step of one prompt."""
        attention = num_tokens * self._attention_flops(num_tokens // 2) / self.rates.flops_per_s
        return self._matrices(num_tokens) + attention

    def prompt_tokens(self, seconds: float, num_seqs: int, kv_len: int) -> int:
        """The most tokens of prompts, at their beginning, in a step that decodes too and takes this time.

        As many as take no time of their own, while the weights are read, are always among them; so are a few more.
        num_seqs, kv_len: of sequences that decode
        """
        left = max(seconds - num_seqs * self._keys(kv_len), self.matrices.read(LONG_PROMPT) / self.rates.bytes_per_s)
        return max(_FEWEST_TOKENS, int(left * self.rates.flops_per_s / self.matrices.flops) - num_seqs)

    @property
    def doubles_after(self) -> int:
        """Tokens of a prompt after which a further one takes twice the time of the first, for its attention."""
        attention = self._attention_flops(LONG_PROMPT)
        return max(1, int(LONG_PROMPT * self.matrices.flops / attention)) if attention else NEVER

    def _matrices(self, num_tokens: int) -> float:
        read = self.matrices.read(num_tokens) / self.rates.bytes_per_s
        return max(read, num_tokens * self.matrices.flops / self.rates.flops_per_s)

    def _keys(self, kv_len: int) -> float:
        """Reading the keys of one sequence, and attending to them."""
        return sum(
            _seen(layer, kv_len)
            * max(
                page_bytes([layer]) / layer.page_size / self.rates.bytes_per_s,
                _flops_of_key(layer) / self.rates.flops_per_s,
            )
            for layer in self.layers
        )

    def _attention_flops(self, kv_len: int) -> int:
        """Operations of a token that attends to kv_len keys."""
        return sum(_seen(layer, kv_len) * _flops_of_key(layer) for layer in self.layers)


def _seen(layer: Problem, kv_len: int) -> int:
    """The keys of kv_len that a token attends to."""
    most = kv_len if layer.window_left == UNLIMITED_WINDOW else layer.window_left + 1
    if isinstance(layer.indexer, Indexer):
        indexing = layer.indexer.indexing
        most = min(most, indexing.top * indexing.unit_keys * indexing.key_tokens)
    return min(kv_len, most)


def _flops_of_key(layer: Problem) -> int:
    return 2 * layer.num_q_heads * (layer.head_dim + layer.v_head_dim)


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The sequences that run at a time, and the most tokens of a step.

    max_batch_size: sequences that run at a time
    chunk:         tokens of a step
    beside:        those of prompts at their beginning, in a step with sequences that decode
    doubles_after: see StepTimes; a prompt gets fewer tokens the further it is
    latency_ms:    the time in which a sequence that decodes is expected to get its next token, or UNBOUNDED
    """

    max_batch_size: int
    chunk: int
    beside: int
    doubles_after: int = NEVER
    latency_ms: float = UNBOUNDED

    @classmethod
    def chosen(cls, times: StepTimes, max_batch_size: int, chunk: int = 0, latency_ms: float = 0.0) -> StepBudget:
        """The budget for these times. chunk, latency_ms: those that are requested; 0: chosen"""
        usual = times.expected
        in_time = int(_CHUNK_SECONDS * usual.rates.flops_per_s / times.matrices.flops)
        chunk = chunk or min(MOST_CHUNK, max(_LEAST_CHUNK, in_time))
        latency_ms = latency_ms or max(_LEAST_LATENCY_MS, 3e3 * usual.decode(max_batch_size, USUAL_LEN))
        beside = usual.prompt_tokens(latency_ms / 1e3, max_batch_size, USUAL_LEN)
        return cls(max_batch_size, chunk, min(chunk, beside), times.doubles_after, latency_ms)

    def line(self) -> str:
        """The budget in words."""
        sizes = f"up to {self.max_batch_size} sequences at a time, in steps of up to {self.chunk} tokens"
        if self.latency_ms == UNBOUNDED:
            return f"{sizes}; the time between tokens is not bounded (--latency)"
        return (
            f"{sizes}, of which prompts get up to {self.beside} while others decode: the next token is expected within "
            f"{self.latency_ms:.3g} ms (--latency)"
        )


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """The expected time of a step of sequences that decode, each of USUAL_LEN tokens, next to its lower bound."""

    sequences: int
    ms: float
    lower_bound_ms: float
    tokens_per_s: float


def expected_steps(times: StepTimes, most: int) -> list[ExpectedStep]:
    """The steps of 1, 32 and 256 sequences, and of the most."""
    found = []
    for size in sorted({min(size, most) for size in (1, 32, 256, most)}):
        bound, usual = (each.decode(size, USUAL_LEN) for each in (times, times.expected))
        found.append(ExpectedStep(size, 1e3 * usual, 1e3 * bound, size / usual))
    return found


def first_token_ms(times: StepTimes) -> float:
    """The expected time to first token of a prompt of PROMPT_LEN tokens, alone."""
    return 1e3 * times.expected.prompt(PROMPT_LEN)


def expected_lines(times: StepTimes, most: int) -> list[str]:
    """All of it in words. most: sequences that run at a time"""
    return [
        f"expected of {times.rates.describe()}:",
        *(
            f"  {step.sequences:>4} sequences of {USUAL_LEN} tokens decode in {step.ms:.3g} ms, "
            f"{step.tokens_per_s:,.0f} tokens/s (lower bound {step.lower_bound_ms:.3g} ms)"
            for step in expected_steps(times, most)
        ),
        f"  a prompt of {PROMPT_LEN} tokens has its first token after {first_token_ms(times):.3g} ms",
    ]
