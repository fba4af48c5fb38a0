"""PagePool and RowTable: the interfaces by which a step uses pages and block tables, the runtime's or an engine's."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rocm_attn.errors import no_such_layer
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PageFormat
from rocm_attn.kernels.metadata.step_tensors import TableTerms
from rocm_attn.paging.index_spaces import Space

_T = TypeVar("_T")


class OfLayers(dict[int, _T]):
    """Layer -> what it has, for every layer of a model. Another one, such as -1, raises BadTensor."""

    def __init__(self, of_each: Iterable[_T]) -> None:
        super().__init__(enumerate(of_each))

    def __missing__(self, layer: int) -> _T:
        raise no_such_layer(layer, len(self))


class SpaceTable(Protocol):
    """Rows of pages of one space on the device.

    space:       the meaning of the ids
    entries:     int32 [num_rows, width], at a fixed address
    window_left: previous keys that a query sees in the space's layer with the longest window; ALL_KEYS: all
    chunk:       keys of a chunk, before which no query sees any page; ALL_KEYS: there are no such chunks
    terms:       whether page 0 belongs to no request, and whether KV may be shorter than the new tokens
    """

    space: Space
    entries: Tensor
    window_left: int
    chunk: int
    terms: TableTerms


class RowTable(Protocol):
    """The rows of requests, in every space that layers live in.

    width:      pages in a row
    page_size:  tokens in a page
    max_kv_len: tokens of the longest sequence
    """

    width: int
    page_size: int
    max_kv_len: int

    @property
    def spaces(self) -> Sequence[SpaceTable]:
        """The tables of all spaces, the full space first if layers live there."""


class PagePool(Protocol):
    """The K and V pages of all layers.

    page_size: tokens in a page
    device:    the device that holds them
    """

    page_size: int
    device: torch.device

    def layer(self, layer: int, /) -> LayerPages:
        """The pages of one layer of the model."""

    def format(self, layer: int) -> PageFormat:
        """The present or future format of the pages of a layer."""

    def index(self, layer: int) -> LayerPages:
        """The index pages of a layer that has an indexer; v is all of k."""

    def state(self, layer: int) -> LayerPages:
        """The pages of the state of a layer whose rows stand for several tokens: K holds values, and V gates."""
