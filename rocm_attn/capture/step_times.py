"""StepTimes: a lower bound on the time of a model's steps, by the device's rates, and the budget of steps it implies.

A step reads the weights once, and multiplies them with each token; the longer of the two counts. Each sequence's KV is
read too, and its recurrent states are read and written. Launches, norms and collectives count as zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rocm_attn.machine.gpus import Rates
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.paging.state_pool import RecurrentLayers, slot_bytes
from rocm_attn.problem import UNLIMITED_WINDOW, Indexer, Problem
from rocm_attn.recurrence import Recurrence

# The shares of a device's rates that steps are expected to reach.
_REACHED_BYTES, _REACHED_FLOPS = 2 / 3, 0.6
# The part of that rate of products which attention of a prompt's tokens is expected to reach. H200, heads of 64: 0.64
# in a prompt of 8,192 tokens; 0.35 for 96 tokens that see 32,768 keys.
_REACHED_BY_ATTENTION = 0.4
# The tokens of the sequences, and of the prompt, for which times are reported.
USUAL_LEN, PROMPT_LEN = 512, 2048
# Attention to a prompt's earlier tokens is bounded exactly at this length.
_LONG_PROMPT = 32768
# A step without sequences that decode has a long prompt's tokens for this time: a prompt that comes later waits for it.
_CHUNK_SECONDS, _LEAST_CHUNK, MOST_CHUNK = 0.25, 2048, 8192
# A step with prompts may take as long as this number of steps that only decode the same sequences. With a server's
# delays, the time between tokens then stays below three times the usual one.
_TIMES_AS_LONG = 2.5
# A waiting request counts as this number of decoding sequences: see StepBudget.tokens_beside. H200, a Llama of 1.1B,
# requests of 512 + 128 tokens: with 4 in place of 1, 256 at once take 0.93 of the time, and half of them have their
# first token in 0.86 of it; 32 at once take 0.97, and half of their first tokens come 6 % later.
DECODING_PER_WAITING = 4
# Prompts go on however many sequences decode.
_FEWEST_TOKENS = 64
# Sequences that run at a time: as many as have room with TOKENS_OF_EACH tokens each.
_FEWEST_SEQS, MOST_SEQS, TOKENS_OF_EACH = 8, 256, 1024
# Stands for a prompt whose later tokens take no longer.
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
        return self.tables + self.shared + self.experts

    def read(self, num_tokens: int) -> float:
        """Bytes that a step reads. Each token chooses its experts by itself."""
        return self.shared + self.experts * (1 - (1 - self.chosen) ** num_tokens)

    @property
    def flops(self) -> float:
        return 2 * (self.shared + self.experts * self.chosen) / self.itemsize


NOT_COUNTED = Matrices(0, 0, 0, 0.0, 1)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one rank's steps, in seconds.

    layers:    one for each layer that attends; several may read the same K and V
    rates:     of the device
    recurrent: one for each layer that keeps a state
    attention_rate: of a prompt's tokens, as a part of the rate of products
    """

    matrices: Matrices
    layers: Sequence[Problem]
    rates: Rates
    recurrent: Sequence[Recurrence] = ()
    attention_rate: float = 1.0

    @property
    def expected(self) -> StepTimes:
        """The times by the parts of the rates that steps are expected to reach."""
        bytes_per_s, flops_per_s = self.rates.bytes_per_s * _REACHED_BYTES, self.rates.flops_per_s * _REACHED_FLOPS
        rates = replace(self.rates, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s)
        return replace(self, rates=rates, attention_rate=_REACHED_BY_ATTENTION)

    def decode(self, num_seqs: int, kv_len: int, prompt_tokens: int = 0) -> float:
        """A step of sequences of kv_len tokens that get one more each, and of tokens at the beginning of a prompt."""
        of_prompt = self._states if prompt_tokens else 0.0
        return self._matrices(num_seqs + prompt_tokens) + num_seqs * self._of_each(kv_len) + of_prompt

    def decode_ms(self, most: int) -> dict[int, float]:
        """Sequences of USUAL_LEN tokens -> milliseconds of their step: 1, 32 and 256, and the most."""
        return {num: 1e3 * self.decode(num, USUAL_LEN) for num in _reported(most)}

    def prompt(self, num_tokens: int) -> float:
        """A step of one prompt."""
        attention = num_tokens * self._attention_flops(num_tokens // 2) / self.rates.flops_per_s
        return self._matrices(num_tokens) + attention + self._states

    def as_json(self, most: int) -> dict[str, object]:
        """The expected times, and the lower bounds. most: sequences that run at a time"""
        usual = self.expected
        of_steps = {"decode_ms": usual.decode_ms(most), "lower_bound_ms": self.decode_ms(most)}
        return {**of_steps, "first_token_ms": 1e3 * usual.prompt(PROMPT_LEN)}

    def prompt_tokens(self, seconds: float, num_seqs: int, kv_len: int) -> int:
        """The most tokens of prompts, at their beginning, in a step that decodes too and takes this time.

        It includes those that take no time of their own, because the weights are read meanwhile, and a few more.
        num_seqs, kv_len: of sequences that decode
        """
        left = max(seconds - num_seqs * self._of_each(kv_len), self._reading)
        in_time = min(left * self.rates.flops_per_s / self.matrices.flops, NEVER)  # the time may be infinite
        return max(_FEWEST_TOKENS, int(in_time) - num_seqs)

    @property
    def read_tokens(self) -> int:
        """Tokens that are multiplied in the time in which the weights are read, in any case."""
        return int(self._reading * self.rates.flops_per_s / self.matrices.flops)

    @property
    def _reading(self) -> float:
        return (self.matrices.shared + self.matrices.experts) / self.rates.bytes_per_s

    @property
    def doubles_after(self) -> int:
        """Tokens of a prompt after which a further one takes twice the time of the first, for its attention."""
        attention = self._attention_flops(_LONG_PROMPT)
        return max(1, int(_LONG_PROMPT * self.matrices.flops / attention)) if attention else NEVER

    def lines(self, most: int) -> list[str]:
        """The expected times in words, next to the lower bounds. most: sequences that run at a time"""
        rates, bounds = self.rates, self.decode_ms(most)
        lines = [
            f"  {num:>4} sequences of {USUAL_LEN} tokens decode in {ms:.3g} ms, {1e3 * num / ms:,.0f} tokens/s "
            f"(lower bound {bounds[num]:.3g} ms)"
            for num, ms in self.expected.decode_ms(most).items()
        ]
        of = f"{rates.bytes_per_s / 1e12:.3g} TB/s and {rates.flops_per_s / 1e12:.4g} TFLOP/s ({rates.source})"
        first = 1e3 * self.expected.prompt(PROMPT_LEN)
        return [
            f"expected of {of}:",
            *lines,
            f"  a prompt of {PROMPT_LEN} tokens has its first token in {first:.3g} ms",
        ]

    def _matrices(self, num_tokens: int) -> float:
        read = self.matrices.read(num_tokens) / self.rates.bytes_per_s
        return max(read, num_tokens * self.matrices.flops / self.rates.flops_per_s)

    @property
    def _states(self) -> float:
        """Reading the states of one sequence with one kept token, and writing them."""
        return 2 * slot_bytes(RecurrentLayers(self.recurrent)) / self.rates.bytes_per_s

    def _of_each(self, kv_len: int) -> float:
        """Reading the keys of one sequence and attending to them, and moving its states."""
        read = ((layer, page_bytes([layer]) / layer.page_size / self.rates.bytes_per_s) for layer in self.layers)
        keys = sum(
            _seen(layer, kv_len) * max(of_key, _flops_of_key(layer) / self.rates.flops_per_s) for layer, of_key in read
        )
        return keys + self._states

    def _attention_flops(self, kv_len: int) -> float:
        """Operations of products that take as long as a token's attention to kv_len keys."""
        return sum(_seen(layer, kv_len) * _flops_of_key(layer) for layer in self.layers) / self.attention_rate


def _reported(most: int) -> list[int]:
    """The numbers of sequences for which times are reported, up to the most."""
    return sorted({min(num, most) for num in (1, 32, 256, most)})


def fitting(kv_tokens: int) -> int:
    """The sequences that run at a time where K and V have room for kv_tokens tokens."""
    return min(MOST_SEQS, max(_FEWEST_SEQS, kv_tokens // TOKENS_OF_EACH))


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
    beside:        those of prompts at their beginning, in a step that decodes 1, 2, ... sequences; the last one is for
                   more
    doubles_after, read_tokens: see StepTimes; a prompt gets fewer tokens the further it is
    latency_ms:    sequences that decode -> the time in which each is expected to get its next token while prompts come
                   in, for some numbers of them; empty: nothing bounds it
    is_firm:       True if prompts get no more tokens however many requests wait for their first token
    sizes:         token counts that steps of prompts and sequences that decode are padded to, ascending
    """

    max_batch_size: int
    chunk: int
    beside: tuple[int, ...]
    doubles_after: int = NEVER
    read_tokens: int = 0
    latency_ms: Mapping[int, float] = field(default_factory=dict)
    is_firm: bool = True
    sizes: tuple[int, ...] = ()

    @classmethod
    def chosen(cls, times: StepTimes, max_batch_size: int, chunk: int = 0, latency_ms: float = 0.0) -> StepBudget:
        """The budget for these times. chunk, latency_ms: those that are requested; 0: chosen"""
        usual = times.expected
        in_time = int(_CHUNK_SECONDS * usual.rates.flops_per_s / times.matrices.flops)
        chunk = chunk or min(MOST_CHUNK, max(_LEAST_CHUNK, in_time))

        def beside(num: int) -> int:
            seconds = latency_ms / 1e3 or _TIMES_AS_LONG * usual.decode(num, USUAL_LEN)
            return min(chunk, usual.prompt_tokens(seconds, num, USUAL_LEN))

        of_each = tuple(beside(num) for num in range(1, max_batch_size + 1))
        expected = {num: 1e3 * usual.decode(num, USUAL_LEN, of_each[num - 1]) for num in _reported(max_batch_size)}
        return cls(
            max_batch_size, chunk, of_each, usual.doubles_after, usual.read_tokens, expected, is_firm=latency_ms > 0
        )

    def tokens_beside(self, num_decoding: int, num_waiting: int = 0) -> int:
        """The tokens of prompts at their beginning, in a step that decodes this number of sequences, at least 1.

        While many requests wait, prompts get more tokens, because fewer steps for the same prompts take less time. Each
        request after the first counts as DECODING_PER_WAITING that decode; if these are more than num_decoding, prompts
        get as many times the tokens, unless the budget is firm.
        num_waiting: requests that have no token yet
        """
        tokens = self.beside[min(num_decoding, len(self.beside)) - 1]
        weight = DECODING_PER_WAITING * (num_waiting - 1)
        if weight > num_decoding and not self.is_firm:
            tokens = min(tokens * weight // num_decoding, self.chunk)
        return tokens

    def lines(self) -> list[str]:
        """The budget in words."""
        sizes = f"up to {self.max_batch_size} sequences at a time, in steps of up to {self.chunk} tokens"
        if not self.latency_ms:
            return [f"{sizes}; the time between tokens is not bounded (--latency)"]
        lines = [
            f"  while {num:>4} decode, prompts get up to {self.tokens_beside(num)} of them, and the next token is "
            f"expected within {ms:.3g} ms"
            for num, ms in self.latency_ms.items()
        ]
        if not self.is_firm:
            lines.append(
                f"  while more than one request waits per {DECODING_PER_WAITING} that decode, prompts get more, and "
                "tokens come later"
            )
        return [f"{sizes} (--latency):", *lines]

    def as_json(self) -> dict[str, object]:
        """The budget, with the tokens of prompts and the times for the same numbers of sequences."""
        of_prompts = {num: self.tokens_beside(num) for num in self.latency_ms}
        sizes = {"max_batch_size": self.max_batch_size, "chunk": self.chunk, "doubles_after": self.doubles_after}
        return {**sizes, "beside": of_prompts, "latency_ms": dict(self.latency_ms)}
