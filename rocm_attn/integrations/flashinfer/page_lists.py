"""PageLists: concatenated lists of pages, as a block table that kernels read without a copy.

Row r of the table begins at entry r of the list, and so overlaps with the rows after it: both strides are 1. The
sequence whose pages begin at entry e uses row e. So no step gathers pages into separate rows.
"""

import torch
from torch import Tensor

from rocm_attn.errors import NeverFits
from rocm_attn.paging.adopted import TableSource


class PageLists:
    """Room for lists of num_entries pages in total, and up to width pages each.

    Entries that no list has are 0, which is a page of any cache: torch's kernels read it, and ignore its contents.
    """

    def __init__(self, num_entries: int, width: int, device: torch.device) -> None:
        self.num_entries, self.width = num_entries, width
        self._num_written = 0
        with torch.inference_mode(False):  # memory that is made in that mode cannot be written outside of it
            # A sequence without pages may begin after the last entry.
            self._entries = torch.zeros(num_entries + 1 + width, dtype=torch.int32, device=device)

    @property
    def table(self) -> TableSource:
        """Returns the table as ExternalAttention takes it. Page 0 is a page like others."""
        return TableSource(self._entries.as_strided((self.num_entries + 1, self.width), (1, 1)), null_page=False)

    def write(self, pages: Tensor, count: int) -> None:
        """Writes the first count pages to the list. Raises NeverFits."""
        if count > self.num_entries:
            raise NeverFits(f"{count} page indices were given, and the wrapper has room for {self.num_entries}")
        self._entries[:count].copy_(pages[:count], non_blocking=True)
        if count < self._num_written:
            self._entries[count : self._num_written].zero_()
        self._num_written = count


def page_bounds(pages: Tensor, count: int) -> Tensor:
    """Returns the smallest and largest of the first count pages, on their device: int64 [2]; 0 and -1 without any."""
    if count == 0 or not len(pages):
        return torch.tensor([0, -1])
    return torch.stack(torch.aminmax(pages[:count])).to(torch.int64)
