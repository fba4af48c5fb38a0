"""The arguments of moving the K and V of accepted paths."""

from typing import NamedTuple

from torch import Tensor


class AcceptedPaths(NamedTuple):
    """The new tokens of a step that are kept, for S sequences in one space; int32.

    path:         [S, W]         place on the path -> node of the sequence's tree, rising; see arguments.py
    num_accepted: [S]            nodes of the path after the first one
    kv_len:       [S]            tokens before the tree, its first node and num_accepted more
    row_of_seq:   [S]            sequence -> line of the table
    table:        [rows, width]  line and page_no -> page
    no_page:      pages up to this one belong to no sequence: 0, or -1 if page 0 is a real page
    """

    path: Tensor
    num_accepted: Tensor
    kv_len: Tensor
    row_of_seq: Tensor
    table: Tensor
    no_page: int
