"""The steps from q . k to the softmax, and the keys that a token sees: one definition for decode and extend.

    score  s = scale * q . k
    cap    s -> soft_cap * tanh(s / soft_cap)
    slope  s -> s - slope[head] * (i - j)                  i, j: kv_index of the query and of the key (ALiBi)
    sink   the softmax of a head has exp(sink[head]) more in its denominator

The keys that the token at kv_index i sees follow from one value, Visibility, and are always a range: [first, end).

    window      first = max(0, i - window_left), or 0 without a limit
                end = min(kv_len, i + window_right + 1), or kv_len without one; causal attention has window_right 0
    chunk       first = i - i % chunk                       where chunks and windows meet, the later of both
    span        a span [b, e) of the step with b <= i < e:  end = max(end, e); if spans_pass, first = min(first, b)

Tokens of a span see each other, before and after themselves: those of an image in a causal prompt, a block of drafts,
or the first tokens of a prefix-LM. Cells of a packed mask replace spans and window_right: then end = kv_len, the bits
hide keys, and window_left is counted from the token's depth in its tree (visible_keys.py).
"""

from dataclasses import dataclass

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
UNLIMITED_WINDOW = -1
# With a cap up to it, exponentials of scores are numbers of bfloat16 without a maximum subtracted, and a million of
# them times V, if V is below 3e6, add up to less than the largest float32.
_MOST_BOUNDED_CAP = 60.0


@dataclass(frozen=True, slots=True)
class Visibility:
    """The keys that tokens of a layer see, as far as the layer determines it; a step may add spans, or cells.

    window_left:  previous keys that a token sees besides its own; -1: all of them. At most chunk - 1 with chunks
    window_right: later keys that it sees; -1: all of them
    chunk:        keys of a chunk: a token sees none before its own chunk, which begins at a multiple; 0: no chunks
    masked:       whether the mask of a step counts, if it brings one: spans, or cells
    spans_pass:   whether tokens of a span see all of it, even what lies before their window or chunk
    """

    window_left: int = UNLIMITED_WINDOW
    window_right: int = 0
    chunk: int = 0
    masked: bool = False
    spans_pass: bool = False

    def __post_init__(self) -> None:
        assert min(self.window_left, self.window_right) >= UNLIMITED_WINDOW
        assert self.chunk == 0 or 0 <= self.window_left < self.chunk, "a chunk is a window, too"
        assert self.chunk == 0 or self.causal, "a token sees none of its chunk after itself"

    @property
    def causal(self) -> bool:
        """True if a token sees nothing after itself."""
        return self.window_right == 0

    @property
    def windowed(self) -> bool:
        """True if a token may see fewer keys than come before it."""
        return self.window_left != UNLIMITED_WINDOW

    @property
    def two_sided(self) -> bool:
        """True if a window lets a token see some keys after itself, or some before itself and all after."""
        return not self.causal and (self.windowed or self.window_right != UNLIMITED_WINDOW)

    @property
    def by_ranges(self) -> bool:
        """True if kernels need a range of keys for each token: by themselves they know window_left of causal tokens,
        and tokens that see all keys.
        """
        return self.chunk > 0 or self.two_sided


CAUSAL = Visibility()


@dataclass(frozen=True, slots=True)
class Scores:
    """The computation of a layer's scores.

    scale:      factor on q . k, positive
    visibility: the keys that tokens see
    soft_cap:   bound of the scores; 0: none
    """

    scale: float
    visibility: Visibility = CAUSAL
    soft_cap: float = 0.0

    def __post_init__(self) -> None:
        assert self.scale > 0
        assert self.soft_cap >= 0

    @property
    def is_bounded(self) -> bool:
        """True if a cap keeps exponentials within bfloat16's range: then no maximum need be subtracted."""
        return 0 < self.soft_cap <= _MOST_BOUNDED_CAP

    @property
    def tanh_scale(self) -> float:
        """q . k -> the exponent, base 2, in tanh(x) = 1 - 2 / (2^(2 x log2 e) + 1); meaningless without a cap."""
        return 2 * self.scale * LOG2_E / self.soft_cap if self.soft_cap else 0.0

    @property
    def base_2_scale(self) -> float:
        """The factor for q . k, or for half the tanh of a cap, that makes the softmax one of powers of 2."""
        return (2 * self.soft_cap or self.scale) * LOG2_E

    @property
    def scales_at_once(self) -> tuple[float, float]:
        """The factors for q . k, and then for its tanh, if the tanh is one instruction (softmax.capped_at_once).

        The kernel multiplies the first one by 0.5 ln 2, after the scale of codes, as key_loop.py does: deterministic
        kernels have its bits. Without a cap there is no tanh, and both are base_2_scale.
        """
        if not self.soft_cap:
            return self.base_2_scale, self.base_2_scale
        return self.tanh_scale, self.base_2_scale * 0.5
