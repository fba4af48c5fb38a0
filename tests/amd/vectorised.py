"""Linear pages as vectorised ones, computed again for tests: element by element as page_rows.py defines them."""

from torch import Tensor


def vectorised_keys(pages: Tensor, x: int) -> Tensor:
    """Converts [pages, page_size, kv_heads, dim] to [pages, kv_heads, dim / x, page_size, x]."""
    count, page_size, heads, dim = pages.shape
    return pages.view(count, page_size, heads, dim // x, x).permute(0, 2, 3, 1, 4).contiguous()


def vectorised_values(pages: Tensor, x: int) -> Tensor:
    """Converts [pages, page_size, kv_heads, dim] to [pages, kv_heads, page_size / x, dim, x]."""
    count, page_size, heads, dim = pages.shape
    return pages.view(count, page_size // x, x, heads, dim).permute(0, 3, 1, 4, 2).contiguous()


def linear_keys(pages: Tensor) -> Tensor:
    """Converts [pages, kv_heads, dim / x, page_size, x] to [pages, page_size, kv_heads, dim]."""
    return pages.permute(0, 3, 1, 2, 4).flatten(3)


def linear_values(pages: Tensor) -> Tensor:
    """Converts [pages, kv_heads, page_size / x, dim, x] to [pages, page_size, kv_heads, dim]."""
    return pages.permute(0, 2, 4, 1, 3).flatten(1, 2)
