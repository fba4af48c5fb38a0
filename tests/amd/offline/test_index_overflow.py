"""Indices fit 32 bits for all arguments that the runtime lets pass; a product that is made too early is found."""

import gc
import re

import pytest

from rocm_lab.races.overflow import prove_no_overflow
from rocm_lab.races.ttir import Operation, parse_ttir
from tests.amd.offline.index_ranges import faults_of
from tests.amd.offline.overflow_record import Launches, all_launches
from tests.amd.offline.ttir_of import ttir_by

MAIN = {
    "gfx942-32x8-128-128-bfloat16-page16-below_2gib": {
        "_choose_experts_kernel",
        "_combine_experts_kernel",
        "_decode_kernel",
        "_draft_steps_kernel",
        "_expert_product_kernel",
        "_extend_kernel",
        "_fill_kernel",
        "_gather_table_kernel",
        "_merge_kernel",
        "_rope_store_kernel",
        "_schedule_kernel",
        "_sort_pairs_kernel",
        "_store_kernel",
    },
    "gfx942-32x8-128-128-bfloat16-page16-above_2gib": {"_decode_kernel", "_extend_kernel", "_store_kernel"},
    "gfx942-16x1-576-512-latent-bfloat16-page64-below_2gib": {"_latent_decode_kernel", "_latent_extend_kernel"},
    "gfx942-64_heads": {"_bound_kernel", "_choose_kernel", "_index_scores_kernel"},
    "gfx942-latent_16": {"_selected_attention_kernel"},
    "gfx942-qwen3_next": {
        "_chunk_rows_kernel",
        "_chunk_walk_kernel",
        "_gated_norm_kernel",
        "_gates_kernel",
        "_token_steps_kernel",
    },
}
LAUNCHES = {each.name: each for each in all_launches()}
# Kernels that are not proved, and why not.
NOT_PROVED = {
    "_cut_rows_kernel": "counts of a row's tokens",
    "_device_inputs_kernel": "it adds up lengths that an engine gives, and reports sums that are too large",
    "_likeliest_kernel": "counts of a row's tokens",
    "_list_kernel": "sums over the sequences of a step",
    "_move_paths_kernel": "places that a path leads to",
    "_move_rows_kernel": "places in a list of words",
    "_pack_mask_kernel": "cells are counted in 64 bits and cut",
    "_peer_sum_kernel": "parts of a vector",
    "_pick_rows_kernel": "counts of a row's tokens",
    "_place_spans_kernel": "programs times sequences",
    "_place_trees_kernel": "nodes of trees",
    "_share_kernel": "sums over the blocks of a step",
}


@pytest.mark.parametrize("name", MAIN)
def test_indices_of_the_main_kernels_fit_32_bits(name: str) -> None:
    launches, found = LAUNCHES[name], set[str]()
    for ttir in ttir_by(launches.call, launches.arch, wants=MAIN[name].__contains__):
        assert not faults_of(ttir)
        found.add(parse_ttir(ttir).name)
    assert found == MAIN[name]


@pytest.mark.nightly
@pytest.mark.parametrize("launches", [each for each in LAUNCHES.values() if each.arch == "gfx942"], ids=str)
def test_indices_of_every_variant_fit_32_bits(launches: Launches) -> None:
    variants = ttir_by(launches.call, launches.arch, wants=lambda name: name not in NOT_PROVED)
    assert not [fault for ttir in variants for fault in faults_of(ttir)]
    assert variants


def test_rows_of_likeliest_tokens_begin_at_64_bits() -> None:
    """The kernel as a whole is not proved."""
    launches = LAUNCHES["gfx942-32x8-128-128-bfloat16-page16-below_2gib"]
    variants = ttir_by(launches.call, launches.arch, wants="_likeliest_kernel".__eq__)
    assert variants
    assert not [fault for ttir in variants for fault in faults_of(ttir) if " %to: " in fault]


STRIDE = re.compile(r"( *)(%\w+) = arith\.muli (%\w+), (%\w+) : i64 (.*)")


def narrowed(ttir: str) -> dict[str, str]:
    """The text with each product of a stride made before both are extended to 64 bits, by the product's line."""
    wide = dict(re.findall(r"(%\w+) = arith\.extsi (%\w+) : i32 to i64", ttir))
    # Tokens of a page are near, where a kernel says so.
    strides = set(re.findall(r"(%\w+(?<!p_token)): i32", ttir.partition("attributes")[0]))
    found = {}
    for line in ttir.splitlines():
        product = STRIDE.fullmatch(line)
        if product and all(each in wide for each in product.group(3, 4)) and wide[product[4]] in strides:
            space, name, *operands, place = product.groups()
            early = f"{space}%early = arith.muli {', '.join(wide[each] for each in operands)} : i32 {place}"
            found[line] = ttir.replace(line, f"{early}\n{space}{name} = arith.extsi %early : i32 to i64 {place}")
    return found


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("gfx942-32x8-128-128-bfloat16-page16-below_2gib", ("_decode_kernel", "_store_kernel", "_rope_store_kernel")),
        ("gfx942-16x1-576-512-latent-bfloat16-page64-below_2gib", ("_latent_decode_kernel",)),
    ],
)
def test_a_product_with_a_stride_in_32_bits_is_found(name: str, kernels: tuple[str, ...]) -> None:
    launches, num = LAUNCHES[name], 0
    texts: dict[str, str] = {}
    for ttir in ttir_by(launches.call, launches.arch, wants=kernels.__contains__):
        texts.setdefault(parse_ttir(ttir).name, ttir)
    assert texts.keys() == set(kernels)
    for ttir in texts.values():
        for text in narrowed(ttir).values():
            (fault,) = faults_of(text)
            assert re.match(r"\w+\.py:\d+: %early: arith\.muli of .* and 0\.\.2147483647 is \d+", fault)
            num += 1
    assert num >= 2


TTIR = """\
module {{
  tt.func public @rows(%table: !tt.ptr<i32>, %out: !tt.ptr<i32>, %stride: i32, %count: i32) attributes {{}} {{
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %block = arith.constant {block} : i32
    %x = tt.get_program_id x : i32
    %at = tt.addptr %table, %x : !tt.ptr<i32>, i32
    %page = tt.load %at : !tt.ptr<i32>
    {lines}
  }}
}}
"""
EARLY = """%0 = arith.muli %page, %stride : i32
    %1 = arith.extsi %0 : i32 to i64
    %2 = tt.addptr %out, %1 : !tt.ptr<i32>, i64
    tt.store %2, %x : !tt.ptr<i32>"""
LATE = """%0 = arith.extsi %page : i32 to i64
    %1 = arith.extsi %stride : i32 to i64
    %2 = arith.muli %0, %1 : i64
    %3 = tt.addptr %out, %2 : !tt.ptr<i32>, i64
    tt.store %3, %x : !tt.ptr<i32>"""
LOOP = """%0 = scf.for %i = %c0 to %count step %block iter_args(%sum = %c0) -> (i32)  : i32 {
      %1 = arith.addi %sum, %block : i32
      scf.yield %1 : i32
    }
    %2 = tt.addptr %out, %0 : !tt.ptr<i32>, i32
    tt.store %2, %x : !tt.ptr<i32>"""
JUMP = """%large = arith.constant 2147482648 : i32
    %0 = scf.for %i = %c0 to %count step %c1 iter_args(%most = %c0) -> (i32)  : i32 {
      %1 = arith.maxsi %most, %large : i32
      %2 = arith.addi %1, %block : i32
      scf.yield %2 : i32
    }
    %3 = tt.addptr %out, %0 : !tt.ptr<i32>, i32
    tt.store %3, %x : !tt.ptr<i32>"""
EXCHANGED = """%0:2 = scf.for %i = %c0 to %count step %c1 iter_args(%one = %x, %two = %c1) -> (i32, i32)  : i32 {
      %1 = arith.addi %two, %block : i32
      scf.yield %1, %one : i32, i32
    }
    %2 = tt.addptr %out, %0#0 : !tt.ptr<i32>, i32
    tt.store %2, %x : !tt.ptr<i32>"""
MASKED = """%0 = arith.muli %page, %block : i32
    %1 = arith.cmpi slt, %page, %block : i32
    %2 = tt.addptr %out, %0 : !tt.ptr<i32>, i32
    tt.store %2, %x, %1 : !tt.ptr<i32>"""
CHOSEN = """%1 = arith.cmpi slt, %page, %block : i32
    scf.if %1 {
      %0 = arith.muli %page, %block : i32
      %2 = tt.addptr %out, %0 : !tt.ptr<i32>, i32
      tt.store %2, %x : !tt.ptr<i32>
    }"""


@pytest.mark.parametrize(
    ("lines", "block", "ranges", "is_proved"),
    [
        (EARLY, 1, {}, False),
        (EARLY, 1, {"table": (0, 1 << 15), "stride": (0, 1 << 15)}, True),
        (EARLY, 1, {"table": (0, 1 << 16), "stride": (0, 1 << 15)}, False),
        (LATE, 1, {}, True),
        (LOOP, 1, {"count": (0, 1 << 20)}, True),
        (LOOP, 64, {"count": (0, 1 << 20)}, False),
        (LOOP, 1, {}, True),
        (LOOP, 2, {"count": (0, 2**31 - 1)}, False),
        (JUMP, 0, {"count": (0, 1 << 20)}, True),
        (JUMP, 1, {"count": (0, 1 << 20)}, False),  # it goes on from where the first round has led
        (EXCHANGED, 0, {"count": (0, 1 << 20)}, True),
        (EXCHANGED, 31, {"count": (0, 1 << 20), "program_x": (31, 31)}, False),  # each grows in every other round
        (MASKED, 1 << 15, {"table": (0, 2**31 - 1)}, True),
        (MASKED, 1 << 16, {"table": (0, 2**31 - 1)}, False),
        (MASKED, 1 << 15, {"table": (-(2**31), 0)}, False),
        (CHOSEN, 1 << 15, {"table": (0, 2**31 - 1)}, True),
        (CHOSEN, 1 << 16, {"table": (0, 2**31 - 1)}, False),
    ],
)
def test_intervals_of_small_kernels(
    lines: str, block: int, ranges: dict[str, tuple[int, int]], is_proved: bool
) -> None:
    proof = prove_no_overflow(TTIR.format(lines=lines, block=block), ranges)
    assert bool(proof.faults) != is_proved, proof.line()


def test_faults_are_in_the_order_of_the_kernel() -> None:
    """They have one place here, like operations of one line."""
    products = [f"%p{at} = arith.muli %{f'p{at - 1}' if at else 'page'}, %stride : i32" for at in range(9)]
    store = "%at = tt.addptr %out, %p8 : !tt.ptr<i32>, i32\ntt.store %at, %x : !tt.ptr<i32>"
    proof = prove_no_overflow(TTIR.format(lines="\n".join((*products, store)), block=1), {})
    assert [re.findall(r"%p\d", fault)[0] for fault in proof.faults] == [f"%p{at}" for at in range(9)]


def test_a_kernel_that_was_analysed_is_freed() -> None:
    def num_operations() -> int:
        gc.collect()
        return sum(isinstance(each, Operation) for each in gc.get_objects())

    before = num_operations()
    prove_no_overflow(TTIR.format(lines=EARLY, block=1), {})
    assert num_operations() == before


def test_what_is_no_ttir_is_not_proved() -> None:
    assert prove_no_overflow("s_endpgm", {}).faults
