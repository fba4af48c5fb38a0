"""Options as fields of dataclasses: the default, the allowed values and the help of each, written once.

Commands make their flags from the fields. Only the standard library is imported, because --help does not wait for
torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from rocm_attn.errors import BadSetting
from rocm_attn.machine.choices import AUTO, DEFAULT_PAGE_SIZE, KV_DTYPES, KV_SCALES, POOLS, PROVIDERS

_KINDS: Mapping[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a finite number"),
    str: (str, "a text"),
    Path: (Path, "a pathlib.Path"),
}


def _is_finite(number: Any) -> bool:
    """True if a number is a finite float, or becomes one."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


@dataclass(frozen=True, slots=True)
class OptionText:
    """An option's help and allowed values.

    help:         the effect of the option
    kind:         type of its values on a command line
    unit:         of a number
    least:        the smallest number allowed
    above:        a number that it must be above
    most:         the largest number allowed
    choices:      the names allowed; an option that is a number may have names too
    default_is:   the default in words, if its value does not show it
    on_generate:  whether it is a flag of `rocm-attn generate`
    """

    help: str
    kind: type
    unit: str
    least: float | None
    choices: Sequence[str]
    default_is: str
    on_generate: bool
    above: float | None = None
    most: float | None = None

    def kind_missed(self, value: object) -> str:
        """The kind of value in words, to follow "it must be", if this one is of another; else empty."""
        kind, words = _KINDS.get(self.kind, (object, ""))
        is_right = isinstance(value, kind) and (not isinstance(value, bool) or self.kind is bool or not words)
        if is_right and self.kind is float:
            is_right = _is_finite(value)
        return "" if is_right else words

    def allows(self, number: float) -> bool:
        """True if a number is within the bounds."""
        return (
            (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
        )

    @property
    def bounds(self) -> str:
        """The bounds in words, to follow "it must be"."""
        each = (("at least", self.least), ("above", self.above), ("at most", self.most))
        return " and ".join(f"{words} {bound}" for words, bound in each if bound is not None)


def option(
    default: Any,
    help: str,
    *,
    kind: type | None = None,
    unit: str = "",
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    default_is: str = "",
    on_generate: bool = True,
) -> Any:
    """A field with an OptionText. kind: of its values; None: that of the default"""
    kind = type(default) if kind is None else kind
    text = OptionText(help, kind, unit, least, choices, default_is, on_generate, above, most)
    return field(default=default, metadata={"option": text})


def option_texts(options: type) -> dict[str, tuple[Any, OptionText]]:
    """name -> (default, text) of every option of a dataclass."""
    return {each.name: (each.default, each.metadata["option"]) for each in fields(options)}


def check_options(options: object) -> None:
    """Raises BadSetting for an option whose value is of another kind, not among its names, or beyond its bounds.

    Numbers become Python's, because NumPy's wrap around.
    """
    for name, (default, text) in option_texts(type(options)).items():
        value: Any = getattr(options, name)
        is_number = isinstance(value, Real)
        if value != default and value not in text.choices:
            if text.kind is str and text.choices:
                raise BadSetting(f"{name} {value!r} is not known; choose one of {', '.join(text.choices)}")
            if must_be := text.kind_missed(value) or ("" if text.allows(value) else text.bounds):
                raise BadSetting(f"{name} is {value!r}; it must be {must_be}")
        if is_number and text.kind in (int, float):
            object.__setattr__(options, name, text.kind(value))


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of a model's attention: those that explain, capture-plan and prewarm share with an engine."""

    provider: str = option(AUTO, "provider of attention kernels", choices=PROVIDERS, default_is="auto: the fastest")
    page_size: int | Literal["auto"] = option(
        DEFAULT_PAGE_SIZE,
        "tokens per page of the KV cache; auto chooses the size with the best kernels for the model's layers",
        unit="TOKENS",
        least=1,
        choices=(AUTO,),
    )
    pool: str = option(
        "linear",
        "layout of K and V in pages, except those of latent layers; auto chooses the layout with the best kernels, "
        "and linear if both are equally good",
        choices=POOLS,
    )
    kv_dtype: str = option(
        AUTO,
        "dtype of K and V in the cache; fp8 is e4m3fnuz on gfx942 and e4m3fn elsewhere",
        choices=KV_DTYPES,
        default_is="auto: that of q",
    )
    kv_scales: str = option(
        AUTO,
        "scales of eight-bit K and V: one per layer, per KV head or per token; for latents also one per 128 elements "
        "within each row (group, as fp8_ds_mla), or per 64 in the page's footer (footer, as DeepSeek-V4). Token, group "
        "and footer scales are computed when KV is written; the others come from the model, or are 1",
        choices=KV_SCALES,
        default_is="auto: token, or layer if the model has scales",
    )
    max_batch_size: int = option(
        0,
        "most sequences that run at a time",
        unit="SEQS",
        least=1,
        default_is="the number of 1024-token sequences that fit into the KV cache, 8 to 256; 64 on a CPU",
    )
    max_kv_len: int | None = option(
        None,
        "tokens of the longest sequence",
        kind=int,
        unit="TOKENS",
        least=2,
        default_is="the model's context",
        on_generate=False,
    )
    num_pages: int | None = option(
        None,
        "pages of the KV cache, including the reserved page 0",
        kind=int,
        unit="PAGES",
        least=2,
        default_is="enough for all sequences",
    )
    swa_pages: int | None = option(
        None,
        "pages of a separate pool for layers with a window; 0: they share the other layers' pool",
        kind=int,
        unit="PAGES",
        least=0,
        default_is="enough for the windows and a chunk",
    )
    deterministic: bool = option(
        False, "make a request's results bitwise independent of the batch, at some cost in speed"
    )
