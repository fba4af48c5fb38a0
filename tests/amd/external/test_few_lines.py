"""The code that an engine's author must write: a line for its KV cache, one for its table, one per kind of step."""

import gc
import math
import weakref

import pytest
import torch

from rocm_attn.errors import BadBatch, BadTensor, WrongState
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.paging.adopted import CsrSource, TableSource, TableUnit
from rocm_attn.paging.adopted_pages import layer_pages
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import Problem
from rocm_attn.step.external_step import ExternalStep

LAYERS, BLOCKS, BLOCK_SIZE, KV_HEADS, DIM = 3, 7, 4, 2, 16
PROBLEM = Problem(
    num_q_heads=4,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    v_head_dim=DIM,
    dtype=torch.float32,
    page_size=BLOCK_SIZE,
    scale=DIM**-0.5,
)
SIZES = {"kv": 2, "layer": LAYERS, "page": BLOCKS, "token": BLOCK_SIZE, "head": KV_HEADS, "dim": DIM}


def build(
    device: torch.device,
    table: TableSource | CsrSource | None = None,
    *,
    page_strides: bool = False,
    provider: str = "torch",
) -> ExternalAttention:
    """Returns attention over an engine's storage in which block 0 is a normal one, as in nano-vllm."""
    source = table or TableSource(torch.full((4, 6), -1, dtype=torch.int32, device=device), null_page=False)
    return ExternalAttention(
        [LayerSource(PROBLEM)] * LAYERS,
        source,
        device=device,
        bounds=Bounds(num_seqs=4, num_tokens=40, kv_len=24, num_pages=BLOCKS),
        options=ExternalOptions(provider=provider, page_strides=page_strides),
    )


AXES = [
    "kv layer page token head dim",
    "layer kv page token head dim",
    "layer page kv token head dim",
    "page layer kv head token dim",
    "kv page token head dim",
    "page kv token head dim",
    "page kv head token dim",
]


@pytest.mark.parametrize("axes", AXES)
def test_a_kv_cache_of_any_axes_is_bound_in_one_line(axes: str, device: torch.device) -> None:
    shape = [SIZES[axis] for axis in axes.split()]
    count = 1 if "layer" in axes else LAYERS
    caches = [torch.arange(math.prod(shape), dtype=torch.float32).view(*shape).to(device) + i for i in range(count)]
    attention = build(device, page_strides=True)
    attention.pages.bind_all(caches[0] if count == 1 else caches, axes)
    at = {"kv": 1, "layer": 2, "page": 5, "token": 3, "head": 1, "dim": 9}
    cell = caches[0 if count == 1 else 2][tuple(at[axis] for axis in axes.split())]
    bound = attention.pages.layer(2)
    assert bound.v[5, 3, 1, 9] == cell
    assert bound.k.shape == bound.v.shape == (BLOCKS, BLOCK_SIZE, KV_HEADS, DIM)
    bound.v[5, 3, 1, 9] = -7
    assert cell == -7, "it is a view"


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (
            "kv page token head dim",
            (2, LAYERS, BLOCKS, 4, 2, 16),
            "the axes are 'kv page token head dim'; name each of",
        ),
        (
            "kv layer page token head head",
            (2, LAYERS, BLOCKS, 4, 2, 16),
            "name each of kv, page, token, head, dim once",
        ),
        ("layer kv page token head dim", (2, LAYERS, BLOCKS, 4, 2, 16), "kv must have 2 entries"),
        ("kv layer page token head dim", (2, LAYERS, BLOCKS, 4, 32), "they name 6 dimensions"),
        ("kv layer page token head dim", (2, 5, BLOCKS, 4, 2, 16), "the KV cache has 5 layers and the model 3"),
        (
            "kv layer page token head dim",
            (2, LAYERS, BLOCKS, 2, 4, 16),
            "layer 0: k has pages of 2 tokens, 4 heads",
        ),
        ("page layer kv token head dim", (BLOCKS, LAYERS, 2, 4, 2, 16), "build with page_strides=True"),
    ],
)
def test_a_kv_cache_of_other_axes_is_refused(
    axes: str, shape: tuple[int, ...], message: str, device: torch.device
) -> None:
    attention = build(device)
    with pytest.raises(BadTensor, match=message):
        attention.pages.bind_all(torch.zeros(shape, device=device), axes)
    with pytest.raises(WrongState, match="layer 0 has no pages yet"):
        attention.seal()
    with pytest.raises(BadTensor, match="name each of"):
        layer_pages([torch.zeros(shape)], "layer " + axes.replace("layer ", ""))
    with pytest.raises(BadTensor, match="axes is a list; it must be of type str"):
        layer_pages([torch.zeros(shape)], axes.split())  # type: ignore[arg-type]
    with pytest.raises(BadTensor, match="kv is a NoneType; it must be of type Sequence"):
        layer_pages(None, "kv page token head dim")  # type: ignore[arg-type]
    with pytest.raises(BadTensor, match="the KV cache of a layer is a NoneType; give a tensor"):
        layer_pages([None], "kv page token head dim")  # type: ignore[list-item]


def test_a_table_is_written_from_lists_and_replaced_by_a_tensor(device: torch.device) -> None:
    table = torch.full((4, 6), -1, dtype=torch.int32, device=device)
    attention = build(device, TableSource(table, null_page=False))
    attention.tables.write([[3, 1, 2], [], [5]])
    assert table[:3, :3].tolist() == [[3, 1, 2], [0, 0, 0], [5, 0, 0]]
    assert table[3].tolist() == [-1] * 6
    attention.tables.write([])
    attention.tables.write([[], []])
    for pages in ([[1]] * 5, [[1] * 7]):
        with pytest.raises(BadTensor, match="do not fit the table of the FULL space"):
            attention.tables.write(pages)
    written = table.clone()
    for strange, message in (([[1.5]], "must hold integers"), ([[2**32 + 1]], "outside of int32")):
        with pytest.raises(BadBatch, match=f"pages holds .*{message}"):
            attention.tables.write(strange)  # type: ignore[arg-type]
    assert table.equal(written), "page 1 would be another sequence's"
    with pytest.raises(BadBatch, match=r"pages is \[1, 2\]; give a list of page ids for each row"):
        attention.tables.write([1, 2])  # type: ignore[list-item]
    for space, named in ((Space.SWA, "SWA"), ("swa", "'swa'")):
        with pytest.raises(BadTensor, match=f"no layer lives in the {named} space"):
            attention.tables.write([[1]], space)  # type: ignore[arg-type]
    other = torch.zeros((2, 8), dtype=torch.int32, device=device)
    attention.tables.use(other)
    attention.tables.write([[6]])
    assert other[0, 0] == 6
    with pytest.raises(BadTensor, match="int32 or int64 with 2 dimensions"):
        attention.tables.use(torch.zeros(6, dtype=torch.int32, device=device))


def test_tables_that_are_not_rows_of_pages_are_written_by_their_engine(device: torch.device) -> None:
    ids = torch.arange(8, dtype=torch.int32, device=device)
    lists = build(device, CsrSource(ids[:5], ids))
    slots = build(device, TableSource(torch.zeros((4, 24), dtype=torch.int32, device=device), TableUnit.SLOT))
    for attention in (lists, slots):
        with pytest.raises(BadTensor, match="has no rows of pages; write into it yourself"):
            attention.tables.write([[1]])
    with pytest.raises(BadTensor, match="give a CsrSource"):
        lists.tables.use(torch.zeros((4, 6), dtype=torch.int32, device=device))


@pytest.mark.parametrize("binds_calls", [False, True])
def test_pages_of_a_call_may_come_after_seal_where_the_engine_says_so(binds_calls: bool, device: torch.device) -> None:
    pages = [torch.zeros((BLOCKS, BLOCK_SIZE, KV_HEADS, DIM), device=device) for _ in range(4)]
    attention = ExternalAttention(
        [LayerSource(PROBLEM)],
        TableSource(torch.zeros((4, 6), dtype=torch.int32, device=device), null_page=False),
        device=device,
        bounds=Bounds(num_seqs=4, num_tokens=40, kv_len=24, num_pages=BLOCKS),
        options=ExternalOptions(provider="torch", binds_calls=binds_calls),
    )
    if not binds_calls:
        attention.pages.bind(0, pages[0], pages[1])
    attention.seal()
    attention.pages.bind(0, pages[0], pages[1])
    if binds_calls:
        attention.pages.bind(0, pages[2], pages[3])
        assert attention.pages.layer(0).k is pages[2]
    else:
        with pytest.raises(WrongState, match="the pages of layer 0 have moved"):
            attention.pages.bind(0, pages[2], pages[3])


def test_tables_that_were_used_before_are_let_go(device: torch.device) -> None:
    """An engine may pass many tables, one per step. Only the last one is held."""
    attention = build(device)
    cache = torch.zeros(2, LAYERS, BLOCKS, BLOCK_SIZE, KV_HEADS, DIM, device=device)
    attention.pages.bind_all(cache, "kv layer page token head dim")
    tables = []
    for _ in range(4):
        table = torch.zeros(4, 6, dtype=torch.int32, device=device)
        tables.append(weakref.ref(table))
        attention.tables.use(table)
        first, q_len = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0, 3, 8], [3, 5]))
        attention.begin(ExternalStep.extend(first, q_len, num_tokens=8, max_q_len=5, max_kv_len=5))
        attention.fill()
        del table
    gc.collect()
    assert [table() is None for table in tables] == [True, True, True, False]


def test_memory_that_steps_have_outgrown_is_let_go(device: torch.device) -> None:
    """The kept plans of steps hold no memory that a larger step has replaced."""
    attention = build(device)
    cache = torch.zeros(2, LAYERS, BLOCKS, BLOCK_SIZE, KV_HEADS, DIM, device=device)
    attention.pages.bind_all(cache, "kv layer page token head dim")
    held = []
    for num_seqs in (1, 4, 1):
        kv_len = torch.ones(num_seqs, dtype=torch.int32, device=device)
        attention.begin(ExternalStep.decode(kv_len, num_seqs=num_seqs, max_kv_len=1))
        assert attention.gate.run is not None
        held.append(weakref.ref(attention.gate.run.to.kv_len))
    gc.collect()
    assert [tensor() is None for tensor in held] == [True, False, False]
