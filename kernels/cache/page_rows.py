"""The layouts of K and V in pages, and one way to read any of them.

                 K pages                                       V pages
    linear       [pages, page_size, kv_heads, head_dim]        [pages, page_size, kv_heads, v_head_dim]
    vectorised   [pages, kv_heads, head_dim / x, page_size, x] [pages, kv_heads, page_size / x, v_head_dim, x]

x elements are 16 bytes, which a thread loads at once: of one key along head_dim, of x values along their tokens.

All layouts are the same six dimensions, the last two of which are adjacent: tokens are counted in groups, and the
elements of a row in vectors. Linear pages have groups of one token and rows of one vector.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageRows:
    """K pages or V pages, token by token.

    cells: [pages, groups, kv_heads, vectors, elements, tokens], a view of the pages: token t of a page belongs to group
           t // tokens, and element d of its row to vector d // elements
    """

    cells: Tensor

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.cells.shape[1] * self.group_tokens

    @property
    def num_heads(self) -> int:
        """KV heads."""
        return self.cells.shape[2]

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.cells.shape[3] * self.vector_elements

    @property
    def vector_elements(self) -> int:
        """Elements of a vector."""
        return self.cells.shape[4]

    @property
    def group_tokens(self) -> int:
        """Tokens of a group."""
        return self.cells.shape[5]

    def read(self, pages: Tensor) -> Tensor:
        """A copy of whole pages, [n, page_size, kv_heads, dim]. pages: integer [n]"""
        picked = self.cells.index_select(0, pages)
        return picked.permute(0, 1, 5, 2, 3, 4).reshape(len(pages), self.page_size, self.num_heads, self.dim)

    def read_tokens(self, page: Tensor, offset: Tensor, rows: Tensor) -> None:
        """Copies tokens to rows [n, kv_heads, dim]. page, offset: integer [n], a token's page and its place there"""
        tokens = self.group_tokens
        at = [page, offset // tokens, None, None, None, offset % tokens]
        # Called by name: indexing with brackets allocates its result.
        torch.ops.aten.index.Tensor_out(self.cells, at, out=rows.unflatten(2, self.cells.shape[3:5]))

    def write_tokens(self, page: Tensor, offset: Tensor, rows: Tensor) -> None:
        """Writes rows [n, kv_heads, dim] to the places of tokens. page, offset: as for read_tokens"""
        tokens = self.group_tokens
        self.cells[page, offset // tokens, :, :, :, offset % tokens] = rows.unflatten(2, self.cells.shape[3:5])

    def zero_tokens(self, page: Tensor, dead: Tensor) -> None:
        """Zeroes tokens of pages. page: integer [n]; dead: bool [n, page_size]"""
        cells = dead.unflatten(1, (-1, self.group_tokens))[:, :, None, None, None, :]
        self.cells[page] = self.cells[page].masked_fill(cells, 0)


def key_rows(k_pages: Tensor) -> PageRows:
    """Returns a view of K pages, linear or vectorised."""
    if k_pages.dim() == 5:
        return PageRows(k_pages.permute(0, 3, 1, 2, 4)[..., None])
    return _linear(k_pages)


def value_rows(v_pages: Tensor) -> PageRows:
    """Returns a view of V pages, linear or vectorised."""
    if v_pages.dim() == 5:
        return PageRows(v_pages.permute(0, 2, 1, 3, 4)[:, :, :, None])
    return _linear(v_pages)


def _linear(pages: Tensor) -> PageRows:
    return PageRows(pages[:, :, :, None, :, None])


def empty_vectorised_pages(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    dims: tuple[int, int],
    vector_elements: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Vectorised K pages and V pages of undefined content.

    dims:            head_dim and v_head_dim, multiples of vector_elements, as page_size is
    vector_elements: x
    """
    k = num_pages, num_kv_heads, dims[0] // vector_elements, page_size, vector_elements
    v = num_pages, num_kv_heads, page_size // vector_elements, dims[1], vector_elements
    return torch.empty(k, dtype=dtype, device=device), torch.empty(v, dtype=dtype, device=device)
