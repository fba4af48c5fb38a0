"""Steps for the fill tests: random lengths with their tables, and the tensors that plain Python derives from them."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from rocm_attn.kernels.metadata.step_tensors import FIELDS, StepTensors
from tests.amd.kernels.attention_cases import GARBAGE, ints

MAX_PAGES = 5
CAPACITY = 9
AFTER = 70  # elements of garbage after each output

OF_TOKEN = ("seq_of_token", "row_of_token", "position_of_token", "last_key_of_token", "slot_of_token")
REQUIRED = ("q_indptr", "last_token_of_seq", *OF_TOKEN)
PAGE_LIST = ("page_indptr", "page_list", "last_page_len")
GROUPS = ("group_indptr", "suffix_kv_len", "suffix_page")
DERIVED = (*REQUIRED, *PAGE_LIST, "block_table", "kv_len_int64", "mask_indptr", *GROUPS)
INT64 = ("kv_len_int64", "mask_indptr")


@dataclass(frozen=True)
class Case:
    """A step's inputs.

    seqs:             (kv_len, q_len) of each live sequence
    pad:              (kv_len, q_len) of each padded one
    num_seqs_padded, num_tokens_padded, list_len: sizes of the outputs
    pages:            of each live sequence, as many as its row of the table holds
    groups:           (sequences, pages) of each group of sequences that share this number of pages
    wanted:           names of the derived tensors that are computed
    """

    seqs: list[tuple[int, int]]
    pad: tuple[int, int]
    num_seqs_padded: int
    num_tokens_padded: int
    list_len: int
    page_size: int
    pages: list[list[int]]
    groups: list[tuple[int, int]] = field(default_factory=list)
    wanted: tuple[str, ...] = DERIVED

    @property
    def width(self) -> int:
        """Number of pages in a row of the table."""
        return max(map(len, self.pages), default=1)

    @property
    def mask_start(self) -> list[int]:
        """Start of the mask of each padded sequence: half of its older keys, and 0 for a pad."""
        starts = [(length - new) // 2 for length, new in self.seqs]
        return starts + [0] * (self.num_seqs_padded - len(self.seqs))

    @property
    def padded_seqs(self) -> list[tuple[int, int]]:
        return self.seqs + [self.pad] * (self.num_seqs_padded - len(self.seqs))

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.seqs)

    @property
    def rows(self) -> list[int]:
        """Row of each live sequence, shuffled."""
        return random.Random(len(self.seqs)).sample(range(1, len(self.seqs) + 1), len(self.seqs))

    @property
    def prefix_len(self) -> list[int]:
        """Prefix length of each live sequence; without groups every one is alone."""
        return [
            pages * self.page_size for count, pages in self.groups or [(1, 0)] * len(self.seqs) for _ in range(count)
        ]

    @property
    def group_end(self) -> list[int]:
        counts = [count for count, _ in self.groups or [(1, 0)] * len(self.seqs)]
        return [sum(counts[: at + 1]) for at, count in enumerate(counts) for _ in range(count)]


def random_pages(seqs: Sequence[tuple[int, int]], width: int, seed: int) -> list[list[int]]:
    """Returns a full row for each sequence, without a repeated page."""
    pages = random.Random(seed).sample(range(1, 50 * (len(seqs) + 1) * width), len(seqs) * width)
    return [pages[at * width : (at + 1) * width] for at in range(len(seqs))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws lengths of 0, 1, around a page, and up to a full row; no sequence, one, and as many as the padded size.

    Pads may have more tokens than there is room for, and a list may be too short for all pages.
    """
    page_size = draw(st.sampled_from([1, 3, 4, 16]))
    longest = MAX_PAGES * page_size
    edges = [0, 1, page_size - 1, page_size, page_size + 1, longest - 1, longest]
    kv_len = st.one_of(st.sampled_from(edges), st.integers(0, longest))
    num_seqs = draw(st.sampled_from([0, 1, 2, CAPACITY - 1, CAPACITY]))
    lengths = draw(st.lists(kv_len, min_size=num_seqs, max_size=num_seqs))
    seqs = [(length, draw(st.one_of(st.just(min(1, length)), st.integers(0, length)))) for length in lengths]
    pad = draw(st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)]))
    num_seqs_padded = draw(st.sampled_from([max(1, num_seqs), CAPACITY, CAPACITY + 4]))
    num_pads = num_seqs_padded - num_seqs
    groups: list[tuple[int, int]] = []
    while (grouped := sum(count for count, _ in groups)) < num_seqs:
        count = draw(st.integers(1, num_seqs - grouped))
        shortest = min(length for length, _ in seqs[grouped : grouped + count])
        groups.append((count, draw(st.integers(0, shortest // page_size))))
    return Case(
        seqs=seqs,
        pad=pad,
        num_seqs_padded=num_seqs_padded,
        num_tokens_padded=max(1, sum(new for _, new in seqs) + draw(st.integers(0, 200))),
        list_len=draw(st.integers(0, sum(-(-length // page_size) for length, _ in seqs) + num_pads + 20)),
        page_size=page_size,
        pages=random_pages(seqs, MAX_PAGES, draw(st.integers(0, 99))),
        groups=groups,
    )


def tensors(case: Case, device: torch.device) -> StepTensors:
    """Returns the step on the device: shuffled rows in a table with a free stride, garbage in and after the outputs."""
    rows = case.rows
    table = torch.full((len(rows) + 1, case.width + 3), GARBAGE, dtype=torch.int32)[:, : case.width]
    table[0] = 0
    for row, pages in zip(rows, case.pages, strict=True):
        table[row] = torch.tensor(pages, dtype=torch.int32)
    num_seqs = case.num_seqs_padded
    shapes = {
        "q_indptr": (num_seqs + 1,),
        "last_token_of_seq": (num_seqs,),
        **dict.fromkeys(OF_TOKEN, (case.num_tokens_padded,)),
        "page_indptr": (num_seqs + 1,),
        "page_list": (case.list_len,),
        "last_page_len": (num_seqs,),
        "block_table": (num_seqs, case.width + 2),
        "kv_len_int64": (num_seqs,),
        "mask_indptr": (num_seqs + 1,),
        "group_indptr": (num_seqs + 1,),
        "suffix_kv_len": (num_seqs,),
        "suffix_page": (num_seqs,),
    }
    # The values of pads in these are not read.
    pads = [GARBAGE] * (num_seqs - len(case.seqs))

    def output(name: str) -> Tensor:
        shape = shapes[name] if name in case.wanted else (0, *shapes[name][1:])
        dtype = torch.int64 if name in INT64 and name in case.wanted else torch.int32
        memory = torch.full((math.prod(shape) + AFTER,), GARBAGE, dtype=dtype, device=device)
        return memory[: math.prod(shape)].view(shape)

    return StepTensors.of(
        ints([], device),
        counts=ints([len(case.seqs), case.num_tokens, 41, 0], device),
        row_of_seq=ints(rows + [0] * (num_seqs - len(rows)), device),
        kv_len=ints([length for length, _ in case.padded_seqs], device),
        q_len=ints([new for _, new in case.padded_seqs], device),
        table=table.to(device) if device.type == "cuda" else table,
        prefix_len=ints([*case.prefix_len, *pads], device),
        group_end=ints([*case.group_end, *pads], device),
        mask_start=ints(case.mask_start, device),
        **{name: output(name) for name in DERIVED},
    )


def is_untouched_after(output: Tensor) -> bool:
    """True if the memory after an output of tensors() is still garbage."""
    return bool((output.as_strided((AFTER,), (1,), output.numel()) == GARBAGE).all())


def written(step: StepTensors) -> dict[str, list[int]]:
    """Returns all tensors of a step except the table, as lists."""
    return {name: getattr(step, name).tolist() for name in FIELDS}


def derived_by_hand(case: Case) -> dict[str, object]:
    """Returns the values of each derived tensor, computed one sequence and one token after the other."""
    page_size = case.page_size
    q_indptr, page_indptr, mask_indptr = [0], [0], [0]
    last_token, last_page_len = [], []
    seq_of_token: list[int] = []
    row_of_token: list[int] = []
    positions: list[int] = []
    last_keys: list[int] = []
    slots: list[int] = []
    page_list: list[int] = []
    block_table: list[list[int]] = []
    lost = False
    for seq, ((length, new), start) in enumerate(zip(case.padded_seqs, case.mask_start, strict=True)):
        row = case.pages[seq] if seq < len(case.seqs) else []
        pages = [row[page_no] if page_no < len(row) else 0 for page_no in range(-(-length // page_size))]
        for kv_index in range(length - new, length):
            if len(positions) < case.num_tokens:
                page = pages[kv_index // page_size] if kv_index >= 0 else 0
                positions.append(max(kv_index, 0))
                last_keys.append(max(kv_index, -1))
                slots.append(page * page_size + max(kv_index, 0) % page_size)
                lost |= page == 0
        seq_of_token += [seq] * new
        row_of_token += [case.rows[seq] if seq < len(case.seqs) else 0] * new
        q_indptr.append(q_indptr[-1] + new)
        page_indptr.append(page_indptr[-1] + len(pages))
        mask_indptr.append(mask_indptr[-1] + new * (length - start))
        last_token.append(q_indptr[-1] - 1 if new else 0)
        last_page_len.append((length - 1) % page_size + 1 if length else 1)
        page_list += pages
        block_table.append([*pages, *[0] * (case.width + 2)][: case.width + 2])
    after = [0] * (case.num_tokens_padded - len(positions))
    # Pads may have more tokens than there is room for. If there is more room, its tokens belong to no sequence.
    room = case.num_tokens_padded
    of_no_sequence = room - len(seq_of_token)
    num_seqs, num_pads = len(case.seqs), case.num_seqs_padded - len(case.seqs)
    begins = [seq for seq in range(num_seqs) if seq == 0 or case.group_end[seq - 1] == seq]
    values: dict[str, object] = {
        "q_indptr": q_indptr,
        "last_token_of_seq": last_token,
        "seq_of_token": (seq_of_token + [case.num_seqs_padded - 1] * of_no_sequence)[:room],
        "row_of_token": (row_of_token + [0] * of_no_sequence)[:room],
        "position_of_token": positions + after,
        "last_key_of_token": last_keys + [-1] * len(after),
        "slot_of_token": slots + after,
        "page_indptr": page_indptr,
        "page_list": (page_list + [0] * case.list_len)[: case.list_len],
        "last_page_len": last_page_len,
        "block_table": block_table,
        "kv_len_int64": [length for length, _ in case.padded_seqs],
        "mask_indptr": mask_indptr,
        # The next start of a group, from each sequence on.
        "group_indptr": [
            min((begin for begin in begins if begin >= seq), default=num_seqs)
            for seq in range(case.num_seqs_padded + 1)
        ],
        "suffix_kv_len": [length - shared for (length, _), shared in zip(case.seqs, case.prefix_len, strict=True)]
        + [0] * num_pads,
        "suffix_page": [shared // page_size for shared in case.prefix_len] + [0] * num_pads,
    }
    return {
        **{name: values[name] if name in case.wanted else [] for name in DERIVED},
        "counts": [len(case.seqs), case.num_tokens, 41, int(lost)],
    }
