"""Problem: the geometry of one kind of attention layer: heads, dims, window, scale, sinks, and the encoding of its KV.

Kernels are chosen for a Problem; layers with equal Problems share kernels and plans.
"""

from __future__ import annotations  # check_fields() reads types as texts

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rocm_attn.errors import BadProblem, Unsupported
from rocm_attn.kernels.attention import scores
from rocm_attn.kernels.attention.scores import Visibility
from rocm_attn.kernels.cache.page_format import RECORDS, Encoding, PageFormat, PoolKind, RecordLayout, Scales
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit, Pooling
from rocm_attn.machine import choices
from rocm_attn.machine.settings import check_fields, require_kind, whole_number

# The types and values that a Problem is made of, importable from here.
__all__ = [
    "ALL_KEYS",
    "DTYPES",
    "UNLIMITED_WINDOW",
    "VECTOR_BYTES",
    "AllKeys",
    "EarlierSelection",
    "Indexer",
    "Indexing",
    "KVEncoding",
    "LastUnit",
    "PoolKind",
    "Pooling",
    "Problem",
    "Row",
    "Scales",
]

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in choices.DTYPES)
UNLIMITED_WINDOW = scores.UNLIMITED_WINDOW
# Kernels count keys in int32, and take scales and caps as float32, so their products with scores are finite. Stores
# divide by the scales of codes: reciprocals, and products with any code, are then normal float32.
_LARGEST_WINDOW = 2**31 - 2
# No sequence is longer, and a sum of this and a few tokens fits 32 bits.
_WHOLE_WINDOW = 2**30
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-100, 2.0**100
# Kernels of float32 round a cap's tanh to about 2^-22, so a score to 2^-22 of the cap: 0.001 for this one.
_LARGEST_CAP = 2.0**12
# Default of Problem.v_head_dim and Problem.scale: derived from head_dim, as in most models.
AS_HEAD_DIM = 0
# Bytes of a vector in a vectorised pool, which a thread loads at once.
VECTOR_BYTES = 16


class KVEncoding(enum.Enum):
    """The encoding of K and V in pages: the dtype of q, or an eight-bit dtype with scales (page_format.py).

    value = code * scale. Problem.kv_scales says which elements share a scale.
    """

    LIKE_Q = "as q"
    E4M3FN = "float8_e4m3fn"
    E4M3FNUZ = "float8_e4m3fnuz"
    E5M2 = "float8_e5m2"

    def over(self, dtype: torch.dtype) -> Encoding:
        """The encoding of K and V in a layer whose q has this dtype."""
        return Encoding.of(dtype) if self is KVEncoding.LIKE_Q else Encoding(self.value)


@dataclass(frozen=True, slots=True)
class AllKeys:
    """No indexer: the layer's queries attend to every key that they may see."""


ALL_KEYS = AllKeys()


@dataclass(frozen=True, slots=True)
class Indexer:
    """Sparse attention: index queries score the layer's own index keys, and the best keys are attended to.

    There is one index key per token, or per key_tokens tokens if the model pools them. Index pages have the same ids as
    the layer's K and V pages.

    num_heads:    index query heads, a multiple of indexing.sets, which share them evenly
    head_dim:     elements of an index query and of an index key
    indexing:     how index keys are scored, and how many are selected
    key_encoding: the encoding of index keys in their pages
    key_scales:   which elements share a scale in eight-bit encodings: LAYER or TOKEN

    Raises BadProblem.
    """

    num_heads: int
    head_dim: int
    indexing: Indexing
    key_encoding: KVEncoding = KVEncoding.LIKE_Q
    key_scales: Scales = Scales.NONE

    def __post_init__(self) -> None:
        _check_indexing(self.indexing)
        check_fields(self, BadProblem, " of an indexer")
        require_kind("key_encoding of an indexer", self.key_encoding, KVEncoding, BadProblem)
        require_kind("key_scales of an indexer", self.key_scales, Scales, BadProblem)
        for name in ("num_heads", "head_dim"):
            whole_number(f"{name} of an indexer", getattr(self, name), BadProblem, least=1)
        if self.num_heads % self.indexing.sets:
            raise BadProblem(
                f"{self.num_heads} index heads select {self.indexing.sets} sets of units; the heads must be a "
                "multiple of the sets"
            )
        _check_scales("index keys", self.key_encoding, self.key_scales)
        if self.key_scales is Scales.HEAD or self.key_scales in RECORDS:
            raise BadProblem("index keys have one head and no records; key_scales must be LAYER or TOKEN")


@dataclass(frozen=True, slots=True)
class EarlierSelection:
    """Sparse attention that reuses the selection of the nearest earlier layer with an Indexer.

    indexing: the indexing of that layer
    Raises BadProblem.
    """

    indexing: Indexing

    def __post_init__(self) -> None:
        _check_indexing(self.indexing)


def _check_indexing(indexing: Indexing) -> None:
    if not isinstance(indexing, Indexing):
        raise BadProblem(f"indexing is {indexing!r}; it must be an Indexing")
    if indexing.refusal:
        raise BadProblem(indexing.refusal)


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens that one row of K and V in a layer's pages stands for: one, or several in compressed KV (DeepSeek-V4).

    A row of several tokens exists once its last token is stored. That token sees it already: a token at position p sees
    the first (p + 1) // tokens rows. Such a layer also keeps a state: the values and gates of recent tokens, from which
    step.layers.fold() computes rows.

    tokens:   tokens per row
    overlaps: whether a row is computed from as many tokens before its own, too. Each token then has two halves of
              values and gates: the first for the row after its own, the second for its own row
    also:     extra columns that are computed with a row, such as those of an index key
    state_dtype: dtype of the kept values and gates: float32, or bfloat16, which takes half as many bytes and adds
              an error that kernels/cache/fold_rows.py bounds

    Raises BadProblem.
    """

    tokens: int = 1
    overlaps: bool = False
    also: int = 0
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_fields(self, BadProblem, " of a row")
        if min(self.tokens, self.also + 1) < 1 or (self.tokens == 1 and (self.overlaps or self.also)):
            raise BadProblem(
                f"a row of {self.tokens} tokens with overlaps={self.overlaps} and also={self.also}; give 1 token or "
                "more, and False and 0 with 1 token, which nothing is folded of"
            )
        if self.state_dtype not in (torch.float32, torch.bfloat16):
            raise BadProblem(f"state_dtype of a row is {self.state_dtype}; it must be torch.float32 or torch.bfloat16")

    @property
    def span(self) -> int:
        """Tokens that a row is computed from."""
        return self.tokens * (1 + self.overlaps)


OF_ONE_TOKEN = Row()


def _check_scales(of: str, encoding: KVEncoding, scales: Scales) -> None:
    if (encoding is KVEncoding.LIKE_Q) != (scales is Scales.NONE):
        raise BadProblem(
            f"{of} in {encoding.name} with scales {scales.name}: eight-bit encodings need LAYER, HEAD, TOKEN, "
            "GROUP or FOOTER, and others NONE"
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """The geometry of one kind of attention layer, on this rank.

    num_q_heads, num_kv_heads:  heads; the first is a multiple of the second (GQA), equal for MHA, 1 KV head for MQA
    head_dim:                   elements of a q and a k row
    dtype:                      dtype of q, k, v and the output
    page_size:                  tokens in a page of the KV pool
    v_head_dim:                 elements of a v row and of an output row; AS_HEAD_DIM: head_dim
    scale:                      factor on q.k before the softmax; AS_HEAD_DIM: head_dim ** -0.5
    window_left:                previous keys a query sees besides its own; -1: all of them. With chunks, it is reduced
                                to chunk - 1
    window_right:               later keys of its sequence a query sees: 0: none (causal); -1: all of them, as in
                                encoders and cross attention; a number, as in ModernBERT
    logits_soft_cap:            s -> cap * tanh(s / cap) on scaled logits; 0: none
    has_sinks:                  whether each head adds a learned logit to the softmax denominator
    pool:                       layout of K and V in pages; LATENT (multi-head latent attention, MLA) has one KV head
    kv_encoding:                encoding of K and V in pages
    kv_scales:                  which elements share a scale in eight-bit encodings
    wants_lse:                  whether attend() will be asked for the log-sum-exp; not every kernel returns it
    has_alibi_slopes:           whether each head subtracts slope * (p - j) from its scaled (and capped) logits, for a
                                query at p and a key at j: later keys gain, as in FlashInfer
    custom_mask:                whether a step may have a mask (batch/mask.py): spans of tokens that see each other, or
                                a tree or bit mask in place of window_right. window_left still hides older keys
    chunk:                      keys in a chunk (Llama 4): a query at position p sees no key before p - p % chunk; 0:
                                no chunks
    spans_pass_window:          whether a query in a span (TokenSpans) sees the whole span, even the part before its
                                window or chunk, as in PaliGemma 2; if not, the window hides that part
    indexer:                    how the keys are selected that attend_selected() attends to
    row:                        the tokens that one row of K and V stands for
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    v_head_dim: int = AS_HEAD_DIM
    scale: float = AS_HEAD_DIM
    window_left: int = UNLIMITED_WINDOW
    window_right: int = 0
    logits_soft_cap: float = 0.0
    has_sinks: bool = False
    has_alibi_slopes: bool = False
    custom_mask: bool = False
    chunk: int = 0
    spans_pass_window: bool = False
    pool: PoolKind = PoolKind.SPLIT
    kv_encoding: KVEncoding = KVEncoding.LIKE_Q
    kv_scales: Scales = Scales.NONE
    wants_lse: bool = False
    indexer: AllKeys | Indexer | EarlierSelection = ALL_KEYS
    row: Row = OF_ONE_TOKEN

    def __post_init__(self) -> None:
        check_fields(self, BadProblem)
        kinds = ("pool", PoolKind), ("kv_encoding", KVEncoding), ("kv_scales", Scales), ("row", Row)
        for name, kind in (*kinds, ("indexer", AllKeys | Indexer | EarlierSelection)):
            if not isinstance(getattr(self, name), kind):
                words = kind.__name__ if isinstance(kind, type) else str(kind).replace(f"{__name__}.", "")
                raise BadProblem(f"{name} is {getattr(self, name)!r}; it must be a {words}")
        if self.v_head_dim == AS_HEAD_DIM:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "page_size"):
            whole_number(name, getattr(self, name), BadProblem, least=1)
        if self.scale == AS_HEAD_DIM:
            object.__setattr__(self, "scale", self.head_dim**-0.5)
        if self.num_q_heads % self.num_kv_heads:
            raise BadProblem(
                f"{self.num_q_heads} query heads over {self.num_kv_heads} KV heads: "
                "the first must be a multiple of the second"
            )
        if self.dtype not in DTYPES:
            raise BadProblem(f"dtype {self.dtype!r} is not one of {', '.join(map(str, DTYPES))}")
        if not SMALLEST_SCALE <= self.scale <= LARGEST_SCALE:
            raise BadProblem(
                f"scale is {self.scale}; it must be a positive number from 2**-100 to 2**100, for instance "
                "head_dim ** -0.5"
            )
        for name, keys in (("window_left", "previous"), ("window_right", "later")):
            if not UNLIMITED_WINDOW <= getattr(self, name) <= _LARGEST_WINDOW:
                raise BadProblem(
                    f"{name} is {getattr(self, name)}; it must be a number of {keys} keys below 2**31 - 1, or -1 "
                    "for all"
                )
            object.__setattr__(self, name, min(getattr(self, name), _WHOLE_WINDOW))
        if not 0 <= self.chunk <= _LARGEST_WINDOW:
            raise BadProblem(f"chunk is {self.chunk}; it must be a number of keys below 2**31 - 1, or 0 for no chunks")
        object.__setattr__(self, "chunk", min(self.chunk, _WHOLE_WINDOW))
        if self.chunk:
            windows = [self.chunk - 1] if self.window_left == UNLIMITED_WINDOW else [self.chunk - 1, self.window_left]
            object.__setattr__(self, "window_left", min(windows))
        if self.spans_pass_window and (not self.custom_mask or self.window_left == UNLIMITED_WINDOW):
            raise BadProblem(
                "spans_pass_window is True in a layer without custom_mask, or without a window or chunks; only "
                "such a layer sees spans, and has a window that they could pass"
            )
        if self.chunk and not self.causal:
            raise BadProblem(f"chunk is {self.chunk} and window_right {self.window_right}; chunks need window_right 0")
        if self.logits_soft_cap != 0 and not SMALLEST_SCALE <= self.logits_soft_cap <= _LARGEST_CAP:
            raise BadProblem(
                f"logits_soft_cap is {self.logits_soft_cap}; it must be a positive number from 2**-100 to 2**12, or 0 "
                "for none: kernels would round scores under a larger one to nothing"
            )
        if self.pool is PoolKind.LATENT and (self.num_kv_heads != 1 or self.v_head_dim > self.head_dim):
            raise BadProblem(
                f"a latent pool with {self.num_kv_heads} KV heads, head_dim {self.head_dim} and v_head_dim "
                f"{self.v_head_dim}: its rows hold V within K, so num_kv_heads must be 1 and v_head_dim at most "
                "head_dim"
            )
        _check_scales("K and V", self.kv_encoding, self.kv_scales)
        if self.kv_scales in RECORDS:
            self._check_records(RECORDS[self.kv_scales])
        self._check_indexer()
        if self.row != OF_ONE_TOKEN:
            self._check_row()
        if self.pool is PoolKind.VECTORIZED:
            self._check_vectors()

    def _check_records(self, record: RecordLayout) -> None:
        coded, rest = self.v_head_dim - record.plain_of_v, self.head_dim - self.v_head_dim
        has_groups = coded > 0 == coded % record.group and coded <= (record.footer or coded) * record.group
        has_rest = rest == 0 if record.plain_of_v else rest % 2 == 0
        is_record = self.pool is PoolKind.LATENT and has_groups and has_rest and self.dtype != torch.float16
        if not is_record or self.kv_encoding is KVEncoding.E5M2:
            after = (
                f"{record.plain_of_v} more than a multiple of {record.group}, at most {record.footer} times, and no "
                "elements after it"
                if record.plain_of_v
                else f"a multiple of {record.group} and an even number of elements after it"
            )
            raise BadProblem(
                f"kv_scales is {self.kv_scales.name}, and K and V are {self.pool.value} in {self.kv_encoding.name} for "
                f"{str(self.dtype).removeprefix('torch.')} with head_dim {self.head_dim} and v_head_dim "
                f"{self.v_head_dim}; records are latent, in E4M3FN or E4M3FNUZ, for bfloat16 or float32, with a "
                f"v_head_dim that is {after}"
            )

    def _check_indexer(self) -> None:
        if isinstance(self.indexer, AllKeys):
            return
        indexing = self.indexer.indexing
        if indexing.sets not in (1, self.num_kv_heads):
            raise BadProblem(
                f"an indexer selects {indexing.sets} sets of units for {self.num_kv_heads} KV heads; give one set, "
                "or one per KV head"
            )
        if self.page_size % indexing.key_tokens:
            raise BadProblem(
                f"index keys of {indexing.key_tokens} tokens in pages of {self.page_size}; the page size must be a "
                "multiple"
            )
        if not self.causal or self.window_left != UNLIMITED_WINDOW or self.custom_mask:
            raise BadProblem(
                "a layer with an indexer must be causal and without a window or custom masks: its indexer determines "
                "the keys that it sees, among all those before"
            )

    def _check_row(self) -> None:
        tokens, indexer = self.row.tokens, self.indexer
        if self.page_size % tokens:
            raise BadProblem(f"rows of {tokens} tokens in pages of {self.page_size}; the page size must be a multiple")
        whole = self.pool is PoolKind.LATENT and self.causal and self.window_left == UNLIMITED_WINDOW
        if not whole or self.has_alibi_slopes or self.custom_mask:
            raise BadProblem(
                "a layer with rows of several tokens must be latent and causal, without a window, ALiBi slopes and "
                "custom masks: its rows have no places of single tokens"
            )
        if isinstance(indexer, AllKeys):
            return
        indexing = indexer.indexing
        if (indexing.key_tokens, indexing.unit_keys, indexing.last_unit) != (tokens, 1, LastUnit.LEFT_OUT):
            raise BadProblem(
                f"an indexer of keys of {indexing.key_tokens} tokens and units of {indexing.unit_keys} keys, whose "
                f"last unit is {indexing.last_unit.value}, for rows of {tokens} tokens; it must choose whole rows: "
                f"key_tokens={tokens}, unit_keys=1, last_unit=LEFT_OUT"
            )

    def _check_vectors(self) -> None:
        for name in ("head_dim", "v_head_dim", "page_size"):
            if getattr(self, name) % self.vector_elements:
                raise BadProblem(
                    f"{name} is {getattr(self, name)} in a vectorised pool; its vectors of {VECTOR_BYTES} bytes "
                    f"hold {self.vector_elements} elements of {self.page_format.encoding.value}, so use a multiple "
                    f"of that or a pool of {PoolKind.SPLIT.value}"
                )

    @property
    def causal(self) -> bool:
        """True if a query sees no key after its own."""
        return self.window_right == 0

    @property
    def visibility(self) -> Visibility:
        """The keys that queries see if the step has no mask."""
        windows = self.window_left, self.window_right
        return Visibility(*windows, self.chunk, self.custom_mask, self.spans_pass_window)

    @property
    def gqa_ratio(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def vector_elements(self) -> int:
        """Elements in one 16-byte vector of a vectorised pool."""
        return VECTOR_BYTES // self.page_format.encoding.dtype.itemsize

    @property
    def page_format(self) -> PageFormat:
        """The format of the layer's pages."""
        return PageFormat(
            self.kv_encoding.over(self.dtype),
            self.pool,
            self.page_size // self.row.tokens,
            self.num_kv_heads,
            self.head_dim,
            self.v_head_dim,
            self.kv_scales,
        )

    @property
    def index_format(self) -> PageFormat | None:
        """The format of the layer's index pages; None without an indexer. They are latent: one row per key, no V."""
        if not isinstance(self.indexer, Indexer):
            return None
        dim = self.indexer.head_dim
        encoding = self.indexer.key_encoding.over(self.dtype)
        page_keys = self.page_size // self.indexer.indexing.key_tokens
        return PageFormat(encoding, PoolKind.LATENT, page_keys, 1, dim, dim, self.indexer.key_scales)

    @property
    def fold_columns(self) -> int:
        """Columns that fold() computes for a row: head_dim, then row.also; 0 if rows stand for one token."""
        return self.head_dim + self.row.also if self.row.tokens > 1 else 0

    @property
    def state_format(self) -> PageFormat | None:
        """The format of the layer's state pages; None if it keeps no state. K holds values, V holds gates."""
        if not self.fold_columns:
            return None
        columns = self.fold_columns * (1 + self.row.overlaps)
        return PageFormat(Encoding.of(self.row.state_dtype), PoolKind.SPLIT, self.page_size, 1, columns, columns)


def all_see_cells(problems: Iterable[Problem]) -> bool:
    """True if every layer with custom_mask serves cells and trees: chunks count places, and those are no depths."""
    return not any(problem.custom_mask and problem.chunk for problem in problems)


def require_cells(problems: Iterable[Problem], what: str, instead: str) -> None:
    """Raises Unsupported for a mask of cells, or trees of drafts, if a masked layer has chunks."""
    if not all_see_cells(problems):
        raise Unsupported(f"{what} in layers with chunks of keys, which count places of tokens; {instead}", [])
