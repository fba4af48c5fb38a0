"""KVPassport: the page formats of a KV pool, for the receiver of a KV transfer; and the layout of tokens in a buffer.

A buffer has no pages. For each layer, in order, it holds K, V, their scales per token, index keys and their scales, if
the layer has them. Each of these is a contiguous stretch, one row [heads, dim] per token, that begins at a multiple of
16 bytes. So page sizes and layouts may differ between the two sides. The state of recurrent layers follows, as a record
(rocm_attn/paging/state_record.py).
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rocm_attn.errors import BadSetting, BadTensor, Unsupported
from rocm_attn.integrations.owners import Owner, pool_of, problems_of, spaces_of, states_of
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PageFormat, PoolKind, Scales
from rocm_attn.machine.settings import require_kind, whole_number
from rocm_attn.machine.values_json import as_json, from_json
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.state_pool import NO_RECURRENT_LAYERS, RecurrentLayers
from rocm_attn.paging.storage import PagePool
from rocm_attn.problem import UNLIMITED_WINDOW, Problem

# The version of the passport and of the buffer's order. Any other version is refused.
VERSION = 5
ALIGNMENT = 16


class Role(enum.Enum):
    """The part of a layer that a stretch of a buffer holds, in this order."""

    K = "K"
    V = "V"
    K_FACTORS = "scales of K"
    V_FACTORS = "scales of V"
    INDEX = "index keys"
    INDEX_FACTORS = "scales of index keys"

    @property
    def is_index(self) -> bool:
        """True if the stretch holds index keys or their scales. An index key may stand for several tokens."""
        return self in (Role.INDEX, Role.INDEX_FACTORS)

    @property
    def is_codes(self) -> bool:
        """True if elements have the encoding of the format. Scales are float32."""
        return self in (Role.K, Role.V, Role.INDEX)


@dataclass(frozen=True, slots=True)
class LayerPassport:
    """One layer of a pool.

    form:        the format of its pages
    index:       the format of its index pages, or None if it has none
    key_tokens:  tokens that an index key stands for
    space:       the name of the space that the layer is in
    window_left: the number of previous keys that a token sees; -1: all of them
    scale_values: scales per layer or head, float32: those of K, of V, and of index keys; empty if there are none
    row_bytes:   stretch -> bytes of a row, for the stretches of the layer, in order
    """

    form: PageFormat
    index: PageFormat | None
    key_tokens: int
    space: str
    window_left: int
    scale_values: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    row_bytes: Mapping[Role, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Computed once: every transfer asks for it, layer after layer.
        object.__setattr__(self, "row_bytes", self._row_bytes())

    def _row_bytes(self) -> Mapping[Role, int]:
        sides = dict(zip((Role.K, Role.V), self.form.side_elements, strict=True))
        rows = {role: count * self.form.encoding.dtype.itemsize for role, count in sides.items() if count}
        if self.form.scales is Scales.TOKEN:
            rows |= dict.fromkeys((Role.K_FACTORS, Role.V_FACTORS)[: len(rows)], 4 * self.form.num_kv_heads)
        if self.index is not None:
            rows[Role.INDEX] = self.index.head_dim * self.index.num_kv_heads * self.index.encoding.dtype.itemsize
            if self.index.scales is Scales.TOKEN:
                rows[Role.INDEX_FACTORS] = 4 * self.index.num_kv_heads
        return rows

    def form_of(self, role: Role) -> PageFormat:
        """Returns the format of the pages that a stretch is taken from."""
        form = self.index if role.is_index else self.form
        assert form is not None
        return form


@dataclass(frozen=True, slots=True)
class KVPassport:
    """The page formats of a model's layers. Sender and receiver of KV exchange it once, before any tokens.

    It has the scales per layer and head from the time when it was made; they change only while a runtime is empty.

    recurrent: the recurrent layers, and `kept`, which decides a state slot's layout
    model:     the caller's words for all else that K and V depend on: weights, rope, the rank; equal on both sides
    """

    layers: tuple[LayerPassport, ...]
    recurrent: RecurrentLayers = NO_RECURRENT_LAYERS
    model: str = ""
    version: int = VERSION

    @classmethod
    def of(cls, owner: Owner, *, model: str = "") -> KVPassport:
        """Makes the passport of a runtime, or of an engine's bound pages. Waits for the device to read scales there.

        Raises BadSetting for an owner of another type, and Unsupported.
        """
        require_kind("model", model, str, BadSetting)
        problems, spaces = problems_of(owner), spaces_of(owner)
        if any(problem.row.tokens > 1 for problem in problems):
            raise Unsupported("rows of several tokens and their state cannot be sent; compute the prompt again", [])
        if any(problem.kv_scales is Scales.FOOTER for problem in problems):
            raise Unsupported("records with scales in the page's footer cannot be sent; compute the prompt again", [])
        layers = zip(range(len(problems)), problems, spaces, strict=True)
        own = states_of(owner).recurrent
        recurrent = RecurrentLayers(own.layers, own.kept) if own.layers else NO_RECURRENT_LAYERS
        return cls(tuple(_layer(pool_of(owner), *each) for each in layers), recurrent, model)

    def to_json(self) -> str:
        """Returns the passport as JSON. Any release with the same `version` can read it."""
        return json.dumps(as_json(self))

    @classmethod
    def from_json(cls, text: str) -> KVPassport:
        """Reads the text of to_json(). Raises BadSetting for any other text, and for another version."""
        try:
            fields = json.loads(text)
            version = fields["version"]
            if version == VERSION:
                passport: KVPassport = from_json(cls, fields, "the passport")
                for layer in passport.layers:
                    _require_valid(layer)
                return passport
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise BadSetting(
                f"this is not the passport of a KV pool ({error}); give the text that KVPassport.to_json() wrote"
            ) from error
        raise BadSetting(
            f"the passport has version {version!r}, and this release reads {VERSION}; use one release on both sides"
        )

    def refusals(self, source: KVPassport) -> list[str]:
        """Returns why tokens of a source cannot be imported here, in sentences; empty if they can.

        Raises BadSetting if the source is no passport.
        """
        if not isinstance(source, KVPassport):
            raise BadSetting(
                f"the source is a {type(source).__name__}; give the KVPassport that from_json() makes of the sender's"
            )
        if source.model != self.model:
            return [f"the source holds K and V of model {source.model!r}, and this side of model {self.model!r}"]
        if len(source.layers) != len(self.layers):
            return [f"the source has {len(source.layers)} layers, and this side has {len(self.layers)}"]
        reasons = []
        for number, (there, here) in enumerate(zip(source.layers, self.layers, strict=True)):
            if why := _why_not(there, here):
                reasons.append(f"layer {number}: {why}")
        return reasons + _why_no_states(source.recurrent, self.recurrent)


@dataclass(frozen=True, slots=True)
class KVExtent:
    """The range of a request's tokens that is transferred.

    kv_len: the number of the request's tokens
    first:  name of a space -> the first token that it still has there: 0, or the first one in the window's pages

    Raises BadSetting for a number that is not whole, or below 0.
    """

    kv_len: int
    first: Mapping[str, int]

    def __post_init__(self) -> None:
        if not isinstance(self.first, Mapping):
            raise BadSetting(f"first of an extent is {self.first!r}; give the first token of each space by its name")
        object.__setattr__(self, "kv_len", whole_number("kv_len of an extent", self.kv_len, least=0))
        first = {
            space: whole_number(f"the first token in {space!r}", token, least=0) for space, token in self.first.items()
        }
        object.__setattr__(self, "first", first)


def require_extent(extent: object) -> None:
    """Raises BadTensor for anything but a KVExtent."""
    if not isinstance(extent, KVExtent):
        raise BadTensor(f"the extent is a {type(extent).__name__}; give the KVExtent that the exporter gave")


class Stretch(NamedTuple):
    """A stretch of a buffer.

    place:     bytes from the buffer's start
    first:     the first token, or index key
    num_rows:  the number of tokens, or index keys
    row_bytes: bytes of one row
    """

    layer: int
    role: Role
    place: int
    first: int
    num_rows: int
    row_bytes: int

    @property
    def end(self) -> int:
        """Bytes from the buffer's start to the end of the stretch."""
        return self.place + self.num_rows * self.row_bytes


def stretches(passport: KVPassport, extent: KVExtent, layers: Sequence[int]) -> list[Stretch]:
    """Returns the layout of some layers' tokens in a buffer. Raises BadTensor for an extent of another source."""
    require_extent(extent)
    found: list[Stretch] = []
    place = 0
    for number in layers:
        layer = passport.layers[number]
        first = extent.first.get(layer.space, -1)
        if not 0 <= first <= extent.kv_len:
            raise BadTensor(
                f"the extent has {dict(extent.first)} of {extent.kv_len} tokens, and layer {number} lives in "
                f"{layer.space!r}; send the extent that the exporter gave"
            )
        for role, row_bytes in layer.row_bytes.items():
            unit = layer.key_tokens if role.is_index else 1
            num_rows = extent.kv_len // unit - first // unit
            found.append(Stretch(number, role, place, first // unit, num_rows, row_bytes))
            place += -(-num_rows * row_bytes // ALIGNMENT) * ALIGNMENT
    return found


def _layer(pool: PagePool, number: int, problem: Problem, space: Space) -> LayerPassport:
    pages = pool.layer(number)
    index = pool.index(number) if problem.index_format is not None else None
    key_tokens = problem.page_size // index.format.page_size if index is not None else 1
    k, v = _scale_values(pages)
    return LayerPassport(
        pages.format,
        None if index is None else index.format,
        key_tokens,
        space.value,
        problem.window_left,
        (k, v, () if index is None else _scale_values(index)[0]),
    )


def _scale_values(pages: LayerPages) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if pages.format.scales not in (Scales.LAYER, Scales.HEAD):
        return (), ()
    assert pages.k_scale is not None
    assert pages.v_scale is not None
    return tuple(pages.k_scale.tolist()), tuple(pages.v_scale.tolist())


def _why_not(there: LayerPassport, here: LayerPassport) -> str:
    """Returns why a layer cannot take another's tokens; empty if it can."""
    for name, source, own in (("pages", there.form, here.form), ("index pages", there.index, here.index)):
        if (source is None) != (own is None):
            return f"one side has {name}, the other has none"
        if source is None or own is None:
            continue
        if why := _why_no_form(source, own):
            return f"{name} of the source hold {source}, and here {own}: {why}"
    if there.key_tokens != here.key_tokens:
        return f"an index key stands for {there.key_tokens} tokens at the source, and for {here.key_tokens} here"
    if there.window_left != here.window_left:
        return f"its window is {there.window_left} at the source, and {here.window_left} here"
    if here.space == Space.FULL.value and there.space != here.space:
        return f"it lives in {there.space!r} at the source, which has released tokens that {here.space!r} keeps here"
    return ""


def _why_no_form(source: PageFormat, own: PageFormat) -> str:
    if (source.num_kv_heads, source.head_dim, source.v_head_dim) != (own.num_kv_heads, own.head_dim, own.v_head_dim):
        return "heads and dims must be equal"
    if (source.kind is PoolKind.LATENT) != (own.kind is PoolKind.LATENT):
        return "latent rows stay latent"
    if source.encoding != own.encoding and not (source.encoding.is_fp8 and own.encoding.is_fp8):
        return "only eight-bit encodings are converted"
    if source.scales != own.scales:
        return "the kind of scale must be equal"
    if source.encoding != own.encoding and own.record is not None:
        return "records are not converted"
    return ""


def _why_no_states(source: RecurrentLayers, own: RecurrentLayers) -> list[str]:
    """Returns why states of a source cannot be stored here, one sentence per layer; empty if they can."""
    if len(source.layers) != len(own.layers):
        return [f"the source has {len(source.layers)} recurrent layers, and this side has {len(own.layers)}"]
    reasons = []
    if source.kept != own.kept:
        reasons.append(f"the source keeps {source.kept} tokens next to a state, and this side keeps {own.kept}")
    for number, (there, here) in enumerate(zip(source.layers, own.layers, strict=True)):
        if there != here:
            reasons.append(
                f"recurrent layer {number}: it is {there} at the source, and {here} here; they must be equal"
            )
    return reasons


def _require_count(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def _require_scales(name: str, form: PageFormat | None, scale_values: tuple[float, ...]) -> None:
    """Raises ValueError unless there are as many scales as the format says, each of them positive and finite."""
    scales = Scales.NONE if form is None else form.scales
    count = math.prod(form.scale_shape) if form is not None and scales in (Scales.LAYER, Scales.HEAD) else 0
    if len(scale_values) != count or not all(0 < scale_value < math.inf for scale_value in scale_values):
        raise ValueError(
            f"scales of {name} are {scale_values}; {count} positive numbers are expected for {scales.value}"
        )


def _require_valid(layer: LayerPassport) -> None:
    """Raises ValueError unless the numbers of a layer that was read are those of a pool's layer."""
    form, index = layer.form, layer.index
    for each in filter(None, (form, index)):
        for name in ("page_size", "num_kv_heads", "head_dim", "v_head_dim"):
            _require_count(name, getattr(each, name), 1)
        if each.kind is PoolKind.LATENT and (each.num_kv_heads != 1 or each.v_head_dim > each.head_dim):
            raise ValueError(f"latent rows of {each}")
    _require_count("key_tokens", layer.key_tokens, 1)
    _require_count("window_left", layer.window_left, UNLIMITED_WINDOW)
    if not layer.space:
        raise ValueError("the space has no name")
    if index is not None and index.page_size * layer.key_tokens != form.page_size:
        raise ValueError(f"index pages have {index.page_size} keys of {layer.key_tokens} tokens for {form}")
    for name, its, scale_values in zip(("K", "V", "index keys"), (form, form, index), layer.scale_values, strict=True):
        _require_scales(name, its, scale_values)
