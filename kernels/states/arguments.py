"""The arguments of recurrent states, as values that launchers and their torch twins take whole.

A layer with a recurrence keeps a state for each sequence instead of K and V for each token. It lies in a slot, which
also has room for the last D new tokens: a later step may keep only some of them, as it does after drafts. A step reads
a sequence's state from one slot and writes it to another one, so that it may run twice.

A step does this for each sequence with q new tokens. S is the state before the first of them: that of the source slot,
with the first `pending` of its kept tokens folded in.

* q <= D: the target slot gets S, and the new tokens are kept in it. They are not part of its state.
* q > D:  the target slot gets the state after all q tokens, and keeps no token.

All q tokens have an output in both cases. The target's memory is undefined before a step; the memory of kept tokens
that a step does not count in `pending` is undefined too, and neither is read.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Values of StatePlaces.source that are no slots.
BEGINS = -1
LEFT_OUT = -2
# Words of a slot's header: kernels/states/places.py.
HEADER_WORDS = 4

# Tokens that the form for prompts takes at once.
CHUNK = 64
# Elements from a token to the next one: offsets in a chunk fit 32 bits.
MOST_TOKEN_STRIDE = 2**31 // CHUNK

# Added to the sum of squares whose root a row is divided by.
NORM_EPSILON = 1e-6

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STATE_DTYPES = (torch.float32, torch.bfloat16)


class GatedForm(NamedTuple):
    """How the rows of a recurrence's output are normalised and gated.

    eps:        added to the mean square
    silu:       whether the gate is silu(gate), and not sigmoid(gate)
    gate_first: whether rows are gated before they are normalised
    """

    eps: float
    silu: bool = True
    gate_first: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StatePlaces:
    """The slots that a step of S sequences and T tokens, both padded, reads and writes.

    source:     int32 [S]      slot of the state before the new tokens. BEGINS: the sequence begins, and its state is 0.
                               LEFT_OUT: the sequence is a pad, or was refused: nothing of it is read or written, and
                               its rows of out are 0
    target:     int32 [S]      slot that is written; neither a source nor another target of the step
    pending:    int32 [S]      kept tokens of the source slot that come before the first new token; 0 if a sequence
                               begins
    q_indptr:   int32 [S + 1]  sequence -> first token; later tokens than [S] says belong to no sequence, and their rows
                               of out are 0
    num_tokens: T
    max_q_len:  no sequence has more new tokens
    """

    source: Tensor
    target: Tensor
    pending: Tensor
    q_indptr: Tensor
    num_tokens: int
    max_q_len: int

    @property
    def num_seqs(self) -> int:
        """S."""
        return self.source.shape[0]

    def check(self) -> None:
        """Asserts dtypes, shapes and contiguity."""
        for places in (self.source, self.target, self.pending):
            assert places.dtype == torch.int32
            assert places.shape == (self.num_seqs,)
            assert places.is_contiguous()
        assert self.q_indptr.dtype == torch.int32
        assert self.q_indptr.shape == (self.num_seqs + 1,)
        assert self.q_indptr.is_contiguous()
        assert self.num_seqs >= 1
        assert self.max_q_len >= 1


class Update(enum.Enum):
    """The update rule of a recurrent state.

    For each v head, the state S is a matrix [dk, dv]. Each token does this, in order:

        S <- exp(decay) * S                      the head's decay, or for row i of S that of channel i
        S <- S + k (beta * (v - S^T k))^T        DELTA
        S <- S + k (beta * v)^T                  SUM
        out = scale * S^T q

    DELTA is from Gated Delta Networks (arXiv 2412.06464), decays per channel from Kimi Linear (arXiv 2510.26692), and
    SUM from Mamba2 (arXiv 2405.21060), where k is called B, q C, v x, beta dt, and decay dt * A.
    """

    DELTA = "delta rule"
    SUM = "sums"


class RecurrenceRule(NamedTuple):
    """The recurrence of a layer, as plain numbers for kernels. Update has the formulas.

    corrects:   whether what a token adds depends on the state, which predicts v
    scale:      of outputs
    normalises: whether q and k are divided by their norms first: x / sqrt(sum(x^2) + 1e-6), transformers' l2norm
                (modeling_qwen3_next.py)
    """

    corrects: bool
    scale: float
    normalises: bool


class RecurrentTokens(NamedTuple):
    """New tokens of a layer, and their outputs. The last stride of each tensor is 1, the others are free.

    q, k:  [T, Hk, dk]
    v:     [T, Hv, dv], of the dtype of q and k; v head h has the q and k of head h // (Hv // Hk)
    decay: float32 [T, Hv], or [T, Hv, dk] if each channel decays by itself; a natural logarithm, at most 0
    beta:  float32 [T, Hv]
    out:   [T, Hv, dv], of the dtype of v, written
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    out: Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        """Those of tokens and heads of q, k, v and decay, of tokens of beta, and of tokens and heads of out."""
        of_sides = (stride for side in (self.q, self.k, self.v, self.decay) for stride in side.stride()[:2])
        return *of_sides, self.beta.stride(0), *self.out.stride()[:2]


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentSlots:
    """The slots of one layer with a recurrence. The last stride of each tensor is 1, the others are free.

    state:  float32 or bfloat16 [slots, Hv, dk, dv]
    k:      [slots, D, Hk, dk], of kept tokens as they were given, of their dtype
    change: float32 [slots, D, Hv, dv], what each added to the state with its k: S <- exp(decay) * S + k change^T. It
            holds beta and, if k is divided by its norm, the factor of k, so that a token which is folded in once more
            needs no product with the state
    decay:  float32 [slots, D, Hv], or [slots, D, Hv, dk] if each channel decays by itself
    """

    state: Tensor
    k: Tensor
    change: Tensor
    decay: Tensor

    @property
    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """The kept tokens' k, changes and decays."""
        return self.k, self.change, self.decay

    @property
    def most_kept(self) -> int:
        """D."""
        return self.k.shape[1]

    @property
    def strides(self) -> tuple[int, ...]:
        """All but those of channels and columns: of the state, then of kept k, changes and decays."""
        return tuple(stride for side in (self.state, *self.kept) for stride in side.stride()[:3])

    @property
    def has_channels(self) -> bool:
        """True if each channel of dk decays by itself."""
        return self.decay.dim() == 4

    @property
    def chunk_words(self) -> int:
        """The float32 words that a chunk has of each v head, next to its rows: chunk_space.py."""
        return self.k.shape[3] if self.has_channels else 2 * CHUNK + 1

    def row_elements(self, rule: RecurrenceRule) -> int:
        """The elements, of the dtype of k, of a token's row of each v head: chunk_space.py."""
        return CHUNK + (2 * self.has_channels + rule.corrects) * self.k.shape[3]

    def workspace_words(self, rule: RecurrenceRule, num_tokens: int, num_seqs: int) -> int:
        """The float32 words of workspace that `recur` needs for steps of T tokens and S sequences, both padded."""
        num_heads = self.state.shape[1]
        rows = (num_tokens * num_heads * self.row_elements(rule) * self.k.itemsize + 15) // 16 * 4
        return rows + (num_tokens // CHUNK + num_seqs) * num_heads * self.chunk_words

    def check(self, tokens: RecurrentTokens, places: StatePlaces) -> None:
        """Asserts dtypes, shapes and strides of slots, tokens and places."""
        places.check()
        num_slots, num_heads, dk, dv = self.state.shape
        num_k_heads, num_tokens = self.k.shape[2], places.num_tokens
        channels = (dk,) * self.has_channels
        assert self.state.dtype in STATE_DTYPES
        assert tokens.v.dtype in DTYPES
        assert num_heads % num_k_heads == 0
        for lead, k, v, decay in (
            ((num_tokens,), tokens.k, tokens.v, tokens.decay),
            ((num_slots, self.most_kept), *self.kept),
        ):
            assert k.shape == (*lead, num_k_heads, dk)
            assert v.shape == (*lead, num_heads, dv)
            assert decay.shape == (*lead, num_heads, *channels)
            assert k.dtype == tokens.v.dtype
            assert decay.dtype == torch.float32
        assert tokens.beta.shape == (num_tokens, num_heads)
        assert tokens.beta.dtype == self.change.dtype == torch.float32
        assert tokens.q.shape == tokens.k.shape
        assert tokens.out.shape == tokens.v.shape
        assert tokens.q.dtype == tokens.out.dtype == tokens.v.dtype
        kept = self.kept if self.most_kept else ()
        assert all(tensor.stride(-1) == 1 for tensor in (*tokens, self.state, *kept)), "the last stride must be 1"


class RecurArgs(NamedTuple):
    """One layer's recurrence in one step.

    workspace: float32, contiguous, of slots.workspace_words(rule, T, S) words; scratch, its content is undefined
    """

    tokens: RecurrentTokens
    rule: RecurrenceRule
    slots: RecurrentSlots
    places: StatePlaces
    workspace: Tensor


class ConvolutionWeights(NamedTuple):
    """A causal convolution of each channel: out[t] = act(bias + sum over j < W: weight[:, j] * x[t - W + 1 + j]).

    weight: [C, W], contiguous, of the dtype of x
    bias:   [C], of the dtype of x, or None
    silu:   whether act is y * sigmoid(y), and not y
    """

    weight: Tensor
    bias: Tensor | None
    silu: bool


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionSlots:
    """The slots of one layer's convolution.

    inputs: [slots, W - 1 + D, C], of the dtype of x; the last stride is 1, the others are free. In a slot lie the last
            W - 1 inputs before the kept tokens, which are 0 before the sequence begins, and then the kept tokens'
    """

    inputs: Tensor

    def most_kept(self, width: int) -> int:
        """D. width: W of the convolution"""
        return self.inputs.shape[1] - width + 1

    def check(self, x: Tensor, out: Tensor, convolution: ConvolutionWeights, places: StatePlaces) -> None:
        """Asserts dtypes, shapes and strides of slots, tokens, weights and places."""
        places.check()
        weight, bias = convolution.weight, convolution.bias
        channels, width = weight.shape
        assert x.shape == out.shape == (places.num_tokens, channels)
        assert self.inputs.shape[2] == channels
        assert self.most_kept(width) >= 0
        assert width >= 2
        assert x.dtype == out.dtype == self.inputs.dtype == weight.dtype
        assert x.dtype in DTYPES
        assert bias is None or (bias.dtype == x.dtype and bias.shape == (channels,) and bias.is_contiguous())
        assert weight.is_contiguous()
        assert x.stride(1) == out.stride(1) == self.inputs.stride(2) == 1, "the last stride must be 1"
