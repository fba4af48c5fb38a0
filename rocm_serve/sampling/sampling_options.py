"""Sampling: how a request picks its tokens. The flags of `rocm-attn generate` and the server's bounds come from it.

Only the standard library is imported, because --help does not wait for torch.
"""

from dataclasses import dataclass
from numbers import Real

from rocm_attn.errors import BadRequest
from rocm_attn.machine.option_texts import option, option_texts
from rocm_attn.machine.settings import whole_number

# Most tokens of one request that have a bias, and the largest size of one.
MOST_BIASES, LARGEST_BIAS = 1024, 100


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request samples its tokens.

    The logits are changed in this order. n[t] is the number of times that token t is among the new tokens so far:

        logits[t] / repetition_penalty         if the prompt or the new tokens have t; if logits[t] <= 0: times it
        logits[t] - presence_penalty           if n[t] > 0
        logits[t] - frequency_penalty * n[t]
        logits[t] + logit_bias[t]

    Then top_k, min_p and top_p are applied in this order, each to the tokens that the one before it has kept. Tokens of
    the prompt count only for repetition_penalty.

    temperature: 0: greedy; above, logits are divided by it before a token is sampled
    top_p:       the likeliest tokens are kept whose probabilities reach this sum, (0, 1]
    seed:        seed of this request's random numbers
    top_k:       number of likeliest tokens that are kept, of equal ones the first; 0: all
    min_p:       least probability of a token that is kept, relative to that of the likeliest, [0, 1]
    presence_penalty, frequency_penalty: [-2, 2]
    repetition_penalty: [0.01, 100]; 1 changes nothing
    logit_bias:  pairs (token id, value added to its logit), each token once, at most 1,024, each value [-100, 100]

    Raises BadRequest.
    """

    temperature: float = option(0.0, "0 takes the likeliest token; above, tokens are sampled", unit="T", least=0)
    top_p: float = option(1.0, "sample among the likeliest tokens of total probability P", unit="P", above=0, most=1)
    seed: int = option(0, "seed of the samples; the same seed gives the same text", unit="SEED", least=0)
    top_k: int = option(0, "sample among the K likeliest tokens", unit="K", least=0, default_is="0: all")
    min_p: float = option(
        0.0,
        "sample among the tokens whose probability is at least this share of the likeliest one's",
        unit="P",
        least=0,
        most=1,
    )
    presence_penalty: float = option(
        0.0, "subtracted from the logits of tokens that the text has", unit="X", least=-2, most=2
    )
    frequency_penalty: float = option(
        0.0, "subtracted from the logit of a token for each time that the text has it", unit="X", least=-2, most=2
    )
    repetition_penalty: float = option(
        1.0,
        "divides the logits of tokens that the prompt or the text has (multiplies negative ones)",
        unit="X",
        least=0.01,
        most=100,
    )
    logit_bias: tuple[tuple[int, float], ...] = option(
        (),
        "added to the logits of single tokens, as in 17=-100,4=2.5",
        kind=tuple,
        unit="TOKEN=BIAS,...",
        default_is="none",
    )

    def __post_init__(self) -> None:
        for name, text in _TEXTS.items():
            value = getattr(self, name)
            if text.kind is tuple:
                continue
            must_be = text.kind_missed(value) or ("" if text.allows(value) else text.bounds)
            if must_be:
                raise BadRequest(f"{name} is {value!r}; it must be {must_be}")
        self._check_biases()

    def _check_biases(self) -> None:
        if not isinstance(self.logit_bias, tuple | list) or not all(map(_is_pair, self.logit_bias)):
            raise BadRequest(f"logit_bias is {self.logit_bias!r}; give pairs of a token id and its bias")
        if len(self.logit_bias) > MOST_BIASES:
            raise BadRequest(f"logit_bias has {len(self.logit_bias)} tokens; at most {MOST_BIASES} are allowed")
        for token, bias in self.logit_bias:
            whole_number("a token of logit_bias", token, BadRequest)
            if not (isinstance(bias, Real) and -LARGEST_BIAS <= bias <= LARGEST_BIAS):
                raise BadRequest(
                    f"logit_bias of token {token} is {bias!r}; it must be at least -{LARGEST_BIAS} and at most "
                    f"{LARGEST_BIAS}"
                )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise BadRequest("logit_bias has a token twice; give each token once")

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """True if logits depend on earlier tokens."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


_TEXTS = {name: text for name, (_, text) in option_texts(Sampling).items()}
