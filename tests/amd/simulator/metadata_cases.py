"""The kernels that publish and derive a step's index tensors, on a simulated arch, word by word against their twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rocm_attn.kernels.attention.pads import launch_clear_pads
from rocm_attn.kernels.cache.move_rows import launch_export_rows, launch_import_rows
from rocm_attn.kernels.cache.tails import launch_zero_tails
from rocm_attn.kernels.metadata.check_pages import launch_check_pages
from rocm_attn.kernels.metadata.device_inputs import launch_device_inputs
from rocm_attn.kernels.metadata.draft_steps import launch_draft_steps
from rocm_attn.kernels.metadata.engine_tensors import (
    Q_BOUNDARIES,
    Q_EACH_ONE,
    Q_LENGTHS,
    EngineLengths,
    EngineRows,
    GatherSource,
    LengthBounds,
    PublishedLengths,
)
from rocm_attn.kernels.metadata.fill import launch_fill
from rocm_attn.kernels.metadata.gather_table import launch_gather_table
from rocm_attn.kernels.metadata.pack_mask import launch_pack_mask
from rocm_attn.kernels.metadata.place_mask import launch_place_mask
from rocm_attn.kernels.metadata.place_trees import launch_place_trees
from rocm_attn.kernels.metadata.publish import launch_publish
from rocm_attn.kernels.metadata.publish_engine import launch_publish_engine
from rocm_attn.kernels.metadata.slot_layout import ECHO, NO_ECHO, RUNS_BEFORE, TAKEN_BY_GRAPH
from rocm_attn.kernels.metadata.step_tensors import Pads, TableTerms
from rocm_attn.kernels.metadata.table_update import launch_table_update
from rocm_attn.kernels.metadata.take_inputs import launch_take_inputs
from rocm_attn.kernels.metadata.take_slots import launch_take_slots
from rocm_attn.kernels.metadata.watch_pages import launch_watch_pages
from rocm_attn.kernels.refs import cache as cache_twins
from rocm_attn.kernels.refs import engine_metadata, sampling
from rocm_attn.kernels.refs import metadata as twins
from rocm_attn.kernels.refs import speculative as speculative_twins
from rocm_attn.kernels.refs.pads import clear_pads
from rocm_attn.kernels.refs.page_watch import watch_pages
from rocm_attn.kernels.sampling.cut_rows import launch_cut_rows
from rocm_attn.kernels.sampling.likeliest import launch_likeliest
from rocm_attn.kernels.sampling.pick_rows import launch_pick_rows
from rocm_attn.kernels.sampling.shape_rows import launch_shape_rows
from rocm_attn.kernels.speculative.accept_drawn import launch_accept_drawn
from rocm_attn.kernels.speculative.accept_sampled import launch_accept_sampled
from rocm_attn.kernels.speculative.move_paths import launch_move_paths
from rocm_attn.kernels.speculative.next_step import launch_next_step
from rocm_lab.simulator.launcher import Simulation, simulated
from tests.amd.kernels.launches_of_tensors import (
    of_check_pages,
    of_device_inputs,
    of_draft_steps,
    of_fill,
    of_pack_mask,
    of_pages,
    of_place_mask,
    of_place_trees,
    of_publish,
    of_take_inputs,
    of_watch_pages,
)
from tests.amd.kernels.moved_cases import moved_pages, moved_rows, moved_words, of_moves
from tests.amd.kernels.parameter_cases import asked_rows, finding, shaping
from tests.amd.kernels.speculative_cases import (
    drawn,
    layers_of_pages,
    of_accept_drawn,
    of_accept_sampled,
    of_move_paths,
    of_next_round,
    of_rounds,
    paths,
    probabilities,
    room,
    rounds,
    trees,
)
from tests.amd.simulator.case import KernelCase
from tests.amd.vectorised import vectorised_keys, vectorised_values

GARBAGE = 0x7F7F7F7F
PAGE_SIZE = 4
REAL_PAGE_0 = TableTerms(null_page=False, short_kv=True)

# Three sequences and two padded ones; rows of the table are 1 to 3, row 0 is all page 0.
KV_LEN, Q_LEN, ROWS = [13, 300, 4, 0, 0], [3, 290, 1, 0, 0], [2, 3, 1, 0, 0]
NUM_SEQS, NUM_TOKENS, PADDED_TOKENS = 3, 294, 300
MASK_START = [2, 0, 1, 0, 0]
PREFIX_LEN, GROUP_END = [8, 8, 0], [2, 2, 3]


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _table() -> Tensor:
    table = 1 + torch.randperm(4 * 80, generator=torch.Generator().manual_seed(0)).view(4, 80).int()
    table[0] = 0
    # A live token of the first sequence has no page.
    table[ROWS[0], 2] = 0
    return table


def _slot() -> Tensor:
    """Returns the words of a ring slot, token ids and prefixes included, and garbage after them."""
    header = [NUM_SEQS, NUM_TOKENS, 41, 1, 40, NO_ECHO, GARBAGE, GARBAGE]
    seqs = [value for values in (ROWS, KV_LEN, Q_LEN) for value in values[:NUM_SEQS]]
    return _ints(*header, *seqs, *range(1000, 1000 + NUM_TOKENS), *PREFIX_LEN, *GROUP_END, *[GARBAGE] * 9)


def _slots() -> Tensor:
    """Returns two slots for graphs, of which the second is due after seven runs."""
    slots = _slot().repeat(2, 1)
    slots[:, ECHO], slots[:, RUNS_BEFORE] = TAKEN_BY_GRAPH, _ints(8, 7)
    return slots


def _parents(num_nodes: int) -> Tensor:
    """Random trees of the live sequences; some parents do not come before their child."""
    drawn = torch.randint(-1, num_nodes, (NUM_SEQS, num_nodes), generator=torch.Generator().manual_seed(1))
    return (drawn % (torch.arange(num_nodes) + 2) - 1).int()


def _garbage(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, GARBAGE, dtype=dtype)


def _updates() -> Tensor:
    """More cells than a program takes, row 0 among them."""
    cells = torch.randperm(33 * 40, generator=torch.Generator().manual_seed(0))[:300]
    return torch.stack([cells // 40, cells % 40, torch.arange(300)], 1).int().view(-1)


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launcher, its twin, and the arguments of both; a tensor that is written holds garbage beforehand."""

    launch: Callable[..., None]
    twin: Callable[..., None]
    tensors: Sequence[Tensor]
    options: dict[str, int]


def _launches() -> dict[str, _Launch]:
    seqs = len(KV_LEN)
    rows, kv_len, q_len, table = _ints(*ROWS), _ints(*KV_LEN), _ints(*Q_LEN), _table()
    counts, counts_before = _ints(NUM_SEQS, NUM_TOKENS, 41, 0), _ints(GARBAGE, GARBAGE, 40, 5)
    # A length, and a number of new tokens, beyond the slot's limits.
    ids, first_writable, stored = torch.arange(NUM_TOKENS, dtype=torch.int32), _ints(0, 9, 2), _ints(90, 9, 400)
    device_lengths = _ints(99, 300, 4), _ints(3, 200, 7), ids, first_writable, stored
    step = _garbage(seqs), _garbage(seqs), _garbage(PADDED_TOKENS)
    prefixes, ids = (_garbage(seqs), _garbage(seqs)), _garbage(PADDED_TOKENS)
    read = counts, rows, kv_len, q_len, table, _ints(*PREFIX_LEN, 0, 0), _ints(*GROUP_END, 0, 0), _ints(*MASK_START)
    derived = _garbage(seqs + 1), _garbage(seqs), *(_garbage(PADDED_TOKENS) for _ in range(4))
    lists = _garbage(seqs + 1), _garbage(90), _garbage(seqs), _garbage(seqs, 90)
    masks = _garbage(seqs, dtype=torch.int64), _garbage(seqs + 1, dtype=torch.int64)
    groups = _garbage(seqs + 1), _garbage(seqs), _garbage(seqs)
    none = [_garbage(0)] * 3 + [_garbage(0, 0)] + [_garbage(0, dtype=torch.int64)] * 2 + [_garbage(0)] * 3
    return {
        "publish": _Launch(
            of_publish(launch_publish, Pads(1, 0)),
            of_publish(twins.publish, Pads(1, 0)),
            [_slot(), counts_before, counts_before, _garbage(seqs), _garbage(seqs), _garbage(seqs), *prefixes, ids],
            {},
        ),
        "publish_without_prefixes": _Launch(
            of_publish(launch_publish, Pads(1, 0)),
            of_publish(twins.publish, Pads(1, 0)),
            [_slot(), counts_before, counts_before, _garbage(seqs), _garbage(seqs), _garbage(seqs), *none[:2], ids],
            {},
        ),
        "take_inputs": _Launch(
            of_take_inputs(launch_take_inputs, Pads(1, 0)),
            of_take_inputs(twins.take_inputs, Pads(1, 0)),
            [_slots(), _ints(7), counts_before, _garbage(seqs), _garbage(seqs), _garbage(seqs), *prefixes, ids],
            {},
        ),
        "device_inputs": _Launch(
            of_device_inputs(launch_device_inputs),
            of_device_inputs(twins.device_inputs),
            [_slot(), *device_lengths, counts, *step],
            {},
        ),
        "place_mask": _Launch(
            of_place_mask(launch_place_mask),
            of_place_mask(twins.place_mask),
            [
                (torch.arange(5003) % 256).to(torch.uint8),
                torch.arange(NUM_TOKENS, dtype=torch.int32),
                counts,
                kv_len,
                q_len,
                _garbage(seqs),
                _garbage(1300),
                _garbage(PADDED_TOKENS),
                _garbage(PADDED_TOKENS),
            ],
            {"keys_before": 3, "window_left": 5},
        ),
        "place_trees": _Launch(
            of_place_trees(launch_place_trees),
            of_place_trees(twins.place_trees),
            [
                _parents(40),
                _ints(3, 41, 1, 0),
                _ints(13, 45, 4, 0),
                _ints(3, 37, 1, 0),
                _garbage(4),
                _garbage(60),
                _garbage(50),
                _garbage(50),
            ],
            {"nodes_before": 2, "branches": 0, "window_left": 3},
        ),
        "draft_steps": _Launch(
            of_draft_steps(launch_draft_steps),
            of_draft_steps(twins.draft_steps),
            [
                _ints(3, 9, 1, 0),
                torch.cat([_ints(13, 300, 4), _garbage(4 * 6 - 3)]),
                _garbage(4 * 20),
                _garbage(4 * 6),
                _garbage(5 * 12),
            ],
            {"num_seqs": 5, "branches": 3, "steps": 4},
        ),
        "table_update": _Launch(
            launch_table_update, twins.table_update, [_updates(), _garbage(33, 40)], {"num_updates": 300}
        ),
        "fill": _Launch(
            of_fill(launch_fill),
            of_fill(twins.fill),
            [*read, *derived, *lists, *masks, *groups],
            {"page_size": PAGE_SIZE},
        ),
        "fill_without_lists": _Launch(
            of_fill(launch_fill), of_fill(twins.fill), [*read, *derived, *none], {"page_size": PAGE_SIZE}
        ),
        "fill_where_page_0_is_real": _Launch(
            of_fill(launch_fill, REAL_PAGE_0),
            of_fill(twins.fill, REAL_PAGE_0),
            [*read, *derived, *none],
            {"page_size": PAGE_SIZE},
        ),
        **_of_engines(),
        **_fix_ups(),
        **_moves(),
        **_speculative(),
    }


def _of_engines() -> dict[str, _Launch]:
    """Cases of the launchers that read an engine's tensors, of both types and any stride."""
    seqs, cases = 5, dict[str, _Launch]()
    boundaries = [sum(Q_LEN[:at]) for at in range(4)]
    for name, q_form, new in (("lengths", Q_LENGTHS, Q_LEN), ("boundaries", Q_BOUNDARIES, boundaries)):
        given = [
            torch.tensor(values).repeat_interleave(2)[::2] for values in (KV_LEN, ROWS, new, [0, 90, 170, 250, 330])
        ]
        cases[f"publish_engine_{name}"] = _Launch(
            _of_engine(launch_publish_engine, q_form),
            _of_engine(engine_metadata.publish_engine, q_form),
            [*given, _slot(), _ints(GARBAGE, GARBAGE, 40, 5), *([_garbage(4)] + [_garbage(seqs) for _ in range(5)])],
            {},
        )
    cases["publish_engine_one_each"] = _Launch(
        _of_engine(launch_publish_engine, Q_EACH_ONE),
        _of_engine(engine_metadata.publish_engine, Q_EACH_ONE),
        [
            _ints(*KV_LEN),
            _slot(),
            _ints(GARBAGE, GARBAGE, 40, 5),
            *([_garbage(4)] + [_garbage(seqs) for _ in range(5)]),
        ],
        {},
    )
    slots = torch.randperm(4 * 400, generator=torch.Generator().manual_seed(0)).view(4, 400)
    slots[2, 8] = -1
    rows, kv_len, slot_map = _ints(*ROWS), _ints(*KV_LEN), torch.randperm(1300, generator=torch.Generator()) - 1
    sources: dict[str, list[Any]] = {
        "pages": [slots.int()],
        "slots_of_a_space": [slots, True, None, slot_map],
        "lists": [slots.view(-1), False, torch.tensor([0, 99, 180, 260, 340])],
    }
    for name, source in sources.items():
        tensors = [x for x in source if isinstance(x, Tensor)]
        cases[f"gather_{name}"] = _Launch(
            _from_source(launch_gather_table, source),
            _from_source(engine_metadata.gather_table, source),
            [*tensors, rows, kv_len, _garbage(seqs + 1, 80)],
            {"page_size": PAGE_SIZE},
        )
    table = torch.randint(0, 500, (6, 400), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    table[2, 8], table[3, 90] = -1, 600
    cases["check_pages"] = _Launch(
        of_check_pages(launch_check_pages, Pads(1, 0)),
        of_check_pages(engine_metadata.check_pages, Pads(1, 0)),
        [_ints(*Q_LEN), table, _ints(500), _ints(NUM_SEQS, NUM_TOKENS, 41, 0), _ints(1, 2, 3, 0, 0), _ints(*KV_LEN)],
        {"page_size": PAGE_SIZE, "window_left": 2**31 - 1},
    )
    filled = torch.arange(PADDED_TOKENS, dtype=torch.int32) + PAGE_SIZE
    given_slots = filled.clone()
    given_slots[7], given_slots[9], given_slots[11] = -1, 2, 999
    to_full = torch.arange(400)
    counts = _ints(NUM_SEQS, NUM_TOKENS, 41, 0)
    cases["take_slots"] = _Launch(
        _take(launch_take_slots), _take(engine_metadata.take_slots), [given_slots, to_full, counts, filled], {}
    )
    cells = (torch.arange(9000) % 3 > 0).to(torch.uint8)
    mask = [
        cells,
        torch.arange(NUM_TOKENS),
        counts,
        _ints(*KV_LEN),
        _ints(*Q_LEN),
        torch.arange(PADDED_TOKENS, dtype=torch.int32) % seqs,
        torch.tensor([0, 39, 8001]),
        _garbage(400),
        _garbage(PADDED_TOKENS),
        _garbage(PADDED_TOKENS),
    ]
    cases["pack_mask"] = _Launch(
        of_pack_mask(launch_pack_mask), of_pack_mask(engine_metadata.pack_mask), mask, {"window_left": 3}
    )
    watched = [
        _ints(3, 9, 41, 0),
        _ints(1, 2, 3, GARBAGE),
        _ints(13, 9, 4, GARBAGE),
        _ints(3, 2, 4, GARBAGE),
        _ints(0, 0, 0, 1, 1, 2, 2, 2, 2, GARBAGE),
        _ints(10, 11, 12, 7, 8, 0, 1, 2, 3, GARBAGE),
        _ints(138, 139, 140, 79, 0, 112, 113, 114, 115, GARBAGE),
        torch.arange(5 * 7, dtype=torch.int32).view(5, 7),
        _ints(0, 1, 2, GARBAGE),
        _watched_entries(),
        (torch.arange(30, 70) << 32) | 3,
        _ints(40, 30, 9, 10, 39, 30, 8, 9, 38, 20, 5, 6, 40, 20, 5, 6, 41, 9, 9, 9, 40, 9, 9, 9).view(3, 8),
    ]
    cases["watch_pages"] = _Launch(
        of_watch_pages(launch_watch_pages), of_watch_pages(watch_pages), watched, {"page_size": PAGE_SIZE}
    )
    logits = torch.randn(3, 4300, generator=torch.Generator().manual_seed(4)).bfloat16()
    picks = [logits, torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.9, 0.37], [0.7, 1.0, 0.62]]), _garbage(3), _garbage(6)]
    cases["pick_rows"] = _Launch(_picks(launch_pick_rows), _picks(sampling.pick_rows), picks, {})
    cases["shape_rows"] = _Launch(launch_shape_rows, sampling.shape_rows, [logits, *shaping(4300)], {})
    cases["cut_rows"] = _Launch(launch_cut_rows, sampling.cut_rows, [asked_rows(), logits.float()], {})
    cases["likeliest"] = _Launch(launch_likeliest, sampling.likeliest, finding(4300), {})
    return cases


def _watched_entries() -> Tensor:
    """Since step 35 the first two rows name the table's pages, except in one entry."""
    entries = (35 << 32) | torch.arange(7, 21).view(2, 7)
    entries[1, 1] = (35 << 32) | 3
    return torch.cat([entries, torch.zeros(1, 7, dtype=torch.int64)])


def _picks(pick: Callable[..., None]) -> Callable[..., None]:
    """pick as a function of the tensors."""
    return lambda logits, terms, tokens, found: pick(logits, terms, tokens, found.view(3, 2), num_drawing=2)


def _of_engine(publish: Callable[..., None], q_form: int) -> Callable[..., None]:
    """publish as a function of the tensors, with its own bounds and pads."""
    sizes = {"num_tokens": PADDED_TOKENS, "min_q_len": 0, "max_q_len": 400, "page_size": PAGE_SIZE}

    def of_tensors(*tensors: Tensor) -> None:
        given, (slot, before, counts, engine_row, row_of_seq, kept, taken, named) = tensors[:-8], tensors[-8:]
        kv_len, rows, q, csr = given if q_form != Q_EACH_ONE else (*given, None, None, None)
        assert kv_len is not None
        to = PublishedLengths(counts, engine_row, row_of_seq, kept, taken, pad_kv_len=1, pad_q_len=0, gathered=True)
        bounds = LengthBounds(EngineRows(4, named, csr), kv_len=320, causal=True, **sizes)
        publish(slot, before, EngineLengths(kv_len, rows, q, q_form), bounds, to)

    return of_tensors


def _from_source(gather: Callable[..., None], source: Sequence[object]) -> Callable[..., None]:
    """gather as a function of the tensors."""

    def of_tensors(*tensors: Tensor, page_size: int) -> None:
        given = iter(tensors)
        placed: list[Any] = [next(given) if isinstance(x, Tensor) else x for x in source]
        gather(GatherSource(*placed), *given, page_size=page_size)

    return of_tensors


def _take(take: Callable[..., None]) -> Callable[..., None]:
    """take_slots as a function of the tensors."""
    return lambda *tensors: take(*tensors, page_size=PAGE_SIZE, null_page=True)


def _fix_ups() -> dict[str, _Launch]:
    """Cases of the launches after kernels of other libraries: dims that are no power of two, in both 16-bit types."""
    lengths = _ints(1, PAGE_SIZE, PAGE_SIZE + 1, 0), _ints(1, PAGE_SIZE, 2, 0)
    table, rows = torch.arange(1, 9, dtype=torch.int32).view(4, 2), _ints(0, 2, 3, 1)
    cases = {}
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        linear = torch.ones(9, PAGE_SIZE, 3, 80, dtype=dtype), torch.ones(9, PAGE_SIZE, 3, 24, dtype=dtype)
        for side in linear:
            side[0] = 0  # the reserved page
        # The layout is that of elements of 4 bytes: vectors of PAGE_SIZE.
        vectorised = vectorised_keys(linear[0], PAGE_SIZE), vectorised_values(linear[1], PAGE_SIZE)
        for layout, pages in (("", linear), ("_vectorised", vectorised)):
            cases[f"zero_tails{layout}-{name}"] = _Launch(
                of_pages(launch_zero_tails), of_pages(cache_twins.zero_tails), [table, rows, *lengths, *pages], {}
            )
        out = torch.ones(7, 5, 80, dtype=dtype), torch.ones(7, 5)
        cases[f"clear_pads-{name}"] = _Launch(launch_clear_pads, clear_pads, [_ints(3, 4, 1, 0), *out], {})
    return cases


def _moves() -> dict[str, _Launch]:
    """Moves tokens within pages, with parts in one memory."""
    moves = {
        "export_rows": (launch_export_rows, cache_twins.export_rows, (4, 6, 16, 16)),
        "import_rows": (launch_import_rows, cache_twins.import_rows, (4, 6, 16, 16)),
        "import_rows-later": (launch_import_rows, cache_twins.import_rows, (8, 6, 14, 16)),
    }
    return {
        name: _Launch(
            of_moves(launch, *span),
            of_moves(twin, *span),
            [moved_words(*span), moved_rows(*span[1:3]), moved_pages()],
            {},
        )
        for name, (launch, twin, span) in moves.items()
    }


def _speculative() -> dict[str, _Launch]:
    """Acceptance of trees, and moves of accepted tokens."""
    return {
        "accept_drawn": _Launch(
            of_accept_drawn(launch_accept_drawn),
            of_accept_drawn(speculative_twins.accept_drawn),
            [drawn(), *trees(), *room(GARBAGE)],
            {},
        ),
        "accept_sampled": _Launch(
            of_accept_sampled(launch_accept_sampled),
            of_accept_sampled(speculative_twins.accept_sampled),
            [*probabilities(), *trees(), *room(GARBAGE)],
            {},
        ),
        "next_step": _Launch(
            of_next_round(launch_next_step, 3),
            of_next_round(speculative_twins.next_step, 3),
            [*rounds(8), *of_rounds(GARBAGE)],
            {},
        ),
        "move_paths": _Launch(
            of_move_paths(launch_move_paths, 0),
            of_move_paths(speculative_twins.move_paths, 0),
            [*paths(), layers_of_pages()],
            {},
        ),
    }


def run_launch(arch: str, name: str) -> Simulation:
    """Runs the kernel on arch and its twin on equal tensors: afterwards all words are equal, also of read-only ones."""
    case = _launches()[name]
    by_kernel, by_twin = _copies(case.tensors), _copies(case.tensors)
    with simulated(arch) as simulation:
        case.launch(*by_kernel, **case.options)
    case.twin(*by_twin, **case.options)
    for index, (left, expected) in enumerate(zip(by_kernel, by_twin, strict=True)):
        assert torch.equal(left, expected), f"tensor {index} of {name} is not the twin's"
    return simulation


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns a copy of each, and the same copy if a tensor occurs twice."""
    copies = {id(tensor): tensor.clone() for tensor in tensors}
    return [copies[id(tensor)] for tensor in tensors]


def metadata_cases(arch: str) -> list[KernelCase]:
    """A case for each launcher of kernels/metadata."""
    return [KernelCase(name, arch, partial(run_launch, arch, name)) for name in _launches()]
