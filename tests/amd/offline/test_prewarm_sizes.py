"""Prewarming compiles the kernels of steps without a graph at every number of sequences, and no others.

Compiles are recorded instead of done, by the key under which Triton keeps a variant.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
import triton

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.mask import TreeMask, random_trees
from rocm_attn.batch.padding import PaddedShape, PaddingPolicy
from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import StepBatch, draft_batch
from rocm_attn.batch.step_kinds import Extra, StepKind
from rocm_attn.capture.prewarm import MOST_TOKENS, eager_steps, prewarm, run_every_kernel
from rocm_attn.guards.registry import Guards
from rocm_attn.hip_graphs.size_ladder import SizeLadder
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import EarlierSelection, Indexer, Indexing, KVEncoding, PoolKind, Problem
from rocm_attn.providers import triton_cdna
from rocm_attn.providers.triton_hopper import TRITONS
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.offline.offline_driver import launched_offline

CPU = torch.device("cpu")

LLAMA = Problem(32, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)
GEMMA = Problem(16, 4, 256, torch.bfloat16, 16, v_head_dim=256, scale=256**-0.5)
GPTOSS = Problem(64, 8, 64, torch.bfloat16, 16, v_head_dim=64, scale=0.125, window_left=1023, has_sinks=True)
LATENT = Problem(16, 1, 576, torch.bfloat16, 16, v_head_dim=512, scale=192**-0.5, pool=PoolKind.LATENT)
MASKED = replace(LLAMA, custom_mask=True)
CHOICE = Indexing(128**-0.5, 512, candidate_blocks=64, block_keys=8)
SPARSE = replace(LATENT, wants_lse=True, indexer=Indexer(32, 128, CHOICE))
RECORDS = replace(SPARSE, kv_encoding=KVEncoding.E4M3FNUZ, kv_scales=Scales.GROUP)

# With the Triton that Hopper's own kernels run with.
HOPPER = replace(known_target("sm_90"), releases=Releases(triton=TRITONS[0]))
# The same of CDNA's.
CDNA = replace(known_target("gfx942"), releases=Releases(triton=triton_cdna.TRITONS[0]))

# Steps of 16 sequences have their own tiles on sm_90, and those of 11 or more are merged within their launch.
SIZES = RuntimeOptions(num_pages=64, max_num_seqs=20, max_kv_len=2048, provider="triton", capture_sizes=(1, 2, 4, 8))

# A kernel and the key by which Triton tells its variants apart.
Variant = tuple[str, str]


def names_of(variants: set[Variant]) -> list[str]:
    """The kernel of each variant, sorted."""
    return sorted(name for name, _ in variants)


class NotedKernel:
    """A variant that was recorded, and does nothing when Triton launches it."""

    function = packed_metadata = None

    def launch_metadata(self, *launch: object) -> None:
        pass

    def run(self, *launch: object) -> None:
        pass


@contextmanager
def noted_variants(found: set[Variant]) -> Iterator[None]:
    """While active, Triton records instead of compiling, as if this process had compiled nothing before."""
    run = triton.JITFunction.run
    caches: dict[int, Any] = {}

    def note(*, key: Any, fn: Any, compile: dict[str, Any], **rest: object) -> bool:
        found.add((fn.name, str(key)))
        # So the next launch finds it: without a kernel Triton would look at each argument again, for a millisecond.
        fn.jit_function.device_caches[compile["device"]][0][key] = NotedKernel()
        return True  # so it is not compiled

    def run_anew(self: Any, *args: Any, **options: Any) -> None:
        if id(self) not in caches:
            caches[id(self)] = defaultdict(self.create_binder)
        compiled, self.device_caches = self.device_caches, caches[id(self)]
        try:
            run(self, *args, **options)
        finally:
            self.device_caches = compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
        patch.setattr(triton.JITFunction, "run", run_anew)
        yield


def target_of(arch: str | Target) -> Target:
    return known_target(arch) if isinstance(arch, str) else arch


def prewarmed(problem: Problem, sizes: RuntimeOptions, arch: str | Target) -> set[Variant]:
    found = set[Variant]()
    with noted_variants(found):
        prewarm([problem], target_of(arch), sizes, device=CPU)
    return found


class Served:
    """A runtime whose steps launch nothing, and rows that hold requests.

    found: the variants that Triton would compile for its steps
    """

    def __init__(self, problem: Problem, sizes: RuntimeOptions, arch: str | Target) -> None:
        self.problem, self.sizes, self.target = problem, sizes, target_of(arch)
        self.found = set[Variant]()
        # Kernels that are only compiled compute no answer.
        guards = Guards().without("echo_check")
        large = replace(sizes, num_pages=2 + sizes.max_num_seqs * 64)
        self.runtime: AttentionRuntime = build_runtime([problem], large, device=CPU, target=self.target, guards=guards)
        self.runtime.head_weights.set(0, HeadWeights.random(problem, torch.Generator()))
        self.rows = np.array([self.runtime.table.admit() for _ in range(sizes.max_num_seqs)], np.int32)
        for row in self.rows.tolist():
            self.runtime.table.reserve(row, min(1024, sizes.max_kv_len))

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While active, launches are recorded."""
        with noted_variants(self.found), launched_offline(self.target.arch):
            yield

    def assert_prewarmed(self) -> None:
        """Checks that a prewarm compiles every variant that was found."""
        missing = self.found - prewarmed(self.problem, self.sizes, self.target)
        assert sorted(name for name, _ in missing) == []

    def batch(self, q_len: Iterable[int]) -> StepBatch:
        """A step of new requests."""
        tokens = np.fromiter(q_len, np.int32)
        return StepBatch(self.rows[: len(tokens)], tokens, tokens)

    def step_after(self, cached: int, q_len: Sequence[int]) -> None:
        """Runs a step of requests that each have `cached` tokens in the cache."""
        rows, tokens = self.rows[: len(q_len)], np.array(q_len, np.int32)
        self.runtime.table.mark_stored(rows, np.full(len(q_len), cached, np.int32))
        self.step(StepBatch(rows, tokens + cached, tokens))

    def step(self, batch: StepBatch) -> None:
        self.attend(self.runtime.step(batch).parts[0])
        self.runtime.end_step()

    def attend(self, step: Part) -> None:
        problem = self.problem
        num_tokens = len(step.token_ids)
        q = torch.empty(num_tokens, problem.num_q_heads, problem.head_dim, dtype=problem.dtype)
        out = torch.empty(num_tokens, problem.num_q_heads, problem.v_head_dim, dtype=problem.dtype)
        k = torch.empty(num_tokens, problem.num_kv_heads, problem.head_dim, dtype=problem.dtype)
        is_latent = problem.pool is PoolKind.LATENT
        v = k[..., : problem.v_head_dim] if is_latent else k.new_empty(*k.shape[:2], problem.v_head_dim)
        step.layers.store_and_attend(0, q, k, v, out)
        step.layers.store(0, k, v)
        step.layers.attend(0, q, out)
        if isinstance(problem.indexer, Indexer):
            heads, dim = problem.indexer.num_heads, problem.indexer.head_dim
            step.layers.store_index(0, torch.empty(num_tokens, dim, dtype=problem.dtype))
            index_q = torch.empty(num_tokens, heads, dim, dtype=problem.dtype)
            step.layers.select(0, index_q, torch.empty(num_tokens, heads))
            step.layers.select_among(0, index_q, torch.empty(num_tokens, heads))
            step.layers.attend_selected(0, q, out, torch.empty(num_tokens, problem.num_q_heads))


def lengths_of(num_seqs: int) -> Iterator[list[int]]:
    """Yields new tokens of steps with num_seqs sequences: decodes, decodes and a prompt, drafts to verify, prompts.

    Prewarming has no steps with these numbers of tokens.
    """
    yield [1] * num_seqs
    if num_seqs > 1:
        yield [1] * (num_seqs - 1) + [3]
        yield [1] * (num_seqs - 1) + [700]
    for each in (3, 5, 23, 75, 1000 // num_seqs):
        yield [each] * num_seqs


def served_at_all_sizes(problem: Problem, sizes: RuntimeOptions, arch: str | Target) -> Served:
    """Serves padded steps of every number of sequences."""
    served = Served(problem, sizes, arch)
    with served.serving():
        for num_seqs in range(1, sizes.max_num_seqs + 1):
            for q_len in lengths_of(num_seqs):
                batch = served.batch(q_len)
                served.step(batch)
                if problem.custom_mask and max(q_len) < 100:
                    served.step(replace(batch, mask=random_trees(batch.q_len, torch.Generator())))
                if sizes.shared_prefixes and max(q_len) == 1:
                    served.step(replace(batch, prefixes=SharedPrefixes([PrefixGroup(num_seqs, 0)])))
    return served


def variants_of(found: set[Variant], kernel: str) -> int:
    return sum(name == kernel for name, _ in found)


@pytest.mark.parametrize(
    ("problem", "arch", "sizes"),
    [
        pytest.param(LLAMA, "sm_90", SIZES, id="llama-sm_90", marks=pytest.mark.nightly),
        pytest.param(replace(LLAMA, num_q_heads=8), "gfx942", replace(SIZES, max_num_seqs=5), id="few-gfx942"),
        pytest.param(LLAMA, "gfx942", SIZES, id="llama-gfx942", marks=pytest.mark.nightly),
        pytest.param(LATENT, "sm_90", SIZES, id="latent-sm_90", marks=pytest.mark.nightly),
        # Hopper's own kernel serves few new tokens and the plain one serves one; or Hopper's serves all.
        pytest.param(LATENT, HOPPER, SIZES, id="latent-hopper", marks=pytest.mark.nightly),
        pytest.param(
            replace(LATENT, num_q_heads=128), HOPPER, SIZES, id="latent-128-hopper", marks=pytest.mark.nightly
        ),
        pytest.param(
            MASKED, "sm_90", replace(SIZES, shared_prefixes=True), id="masks-sm_90", marks=pytest.mark.nightly
        ),
        pytest.param(GEMMA, "sm_90", replace(SIZES, max_num_seqs=70), id="gemma-sm_90", marks=pytest.mark.nightly),
        pytest.param(GPTOSS, "sm_90", replace(SIZES, max_num_seqs=70), id="window-sm_90", marks=pytest.mark.nightly),
        pytest.param(LLAMA, "sm_90", replace(SIZES, deterministic=True), id="segments", marks=pytest.mark.nightly),
        pytest.param(LLAMA, "sm_90", replace(SIZES, deterministic=True, max_num_seqs=5), id="few-segments"),
        pytest.param(SPARSE, "gfx942", replace(SIZES, max_num_seqs=3), id="sparse"),
        pytest.param(SPARSE, CDNA, replace(SIZES, max_num_seqs=3), id="sparse-cdna"),
        pytest.param(RECORDS, "gfx942", replace(SIZES, max_num_seqs=3), id="records"),
        pytest.param(MASKED, "gfx950", replace(SIZES, shared_prefixes=True), id="gfx950", marks=pytest.mark.nightly),
    ],
)
def test_every_number_of_sequences_finds_its_variants(
    problem: Problem, arch: str | Target, sizes: RuntimeOptions
) -> None:
    served = served_at_all_sizes(problem, sizes, arch)
    assert len(served.found) >= 9
    served.assert_prewarmed()


def test_a_layer_that_reuses_a_choice_is_compiled_after_the_one_that_makes_it() -> None:
    """The nearest earlier layer with an indexer is not the first one of its kind."""
    other = replace(SPARSE, indexer=Indexer(16, 128, CHOICE))
    layers = [SPARSE, other, SPARSE, replace(SPARSE, indexer=EarlierSelection(CHOICE))]
    found = set[Variant]()
    runtime = build_runtime(
        layers, SIZES, device=CPU, target=known_target("gfx942"), guards=Guards().without("echo_check")
    )
    with noted_variants(found), launched_offline("gfx942"):
        run_every_kernel(runtime, 4)
    kernels = {"_index_scores_kernel", "_choose_kernel", "_leave_out_kernel", "_selected_attention_kernel"}
    assert kernels <= {name for name, _ in found}


# Prompts of three sequences. Gluon's kernel is not compiled here: it is left out, and the kernels compiled next to it
# are not.
OF_THREE = [[new] * num_seqs for num_seqs in (1, 2, 3) for new in (3, 23, 75, 1000 // num_seqs)]
THREE = {"max_num_seqs": 3, "max_kv_len": 1024}


@pytest.mark.parametrize(
    ("layer", "sizes", "cached", "steps", "kernel"),
    [
        *(
            pytest.param(
                {"head_dim": dim, "v_head_dim": dim},
                THREE,
                cached,
                OF_THREE,
                "_extend_kernel",
                marks=[pytest.mark.nightly] * ((dim, cached) != (96, 1)),
            )
            for dim in (32, 64, 96)
            for cached in (0, 1)
        ),
        # Blocks become larger at a number of tokens, with no doubled number between it and the largest possible.
        *(
            pytest.param(
                {"num_q_heads": 8 if dim == 32 else 32, "head_dim": dim, "v_head_dim": dim},
                {"max_num_seqs": 3, "max_kv_len": 450},
                0,
                [[new] * 3 for new in (160, 340, 400, 450)],
                "_store_kernel",
                marks=[pytest.mark.nightly] * (dim != 96),
            )
            for dim in (32, 96, 128)
        ),
        # Prompts as long as a row of the table: the longest that prewarming tries leaves no room for another token.
        pytest.param(
            {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 64, "v_head_dim": 64},
            {"num_pages": 100, "max_num_seqs": 1, "max_kv_len": 512, "capture_sizes": (1,)},
            1,
            [[2], [75], [200], [260], [402], [511]],
            "_extend_merge_kernel",
        ),
        # Merges depend on the number of programs per row; tiles depend on a mean over padded sequences.
        pytest.param(
            {"num_q_heads": 8, "num_kv_heads": 1},
            {"num_pages": 2050, "max_num_seqs": 8, "max_kv_len": 4096, "capture_sizes": (1, 2, 4, 8)},
            1,
            [[5] * 6, [7, 4, 5], [9] * 3, [33] * 5],
            "_extend_merge_kernel",
        ),
    ],
)
def test_prompts_find_their_variants_where_those_alone_have_a_kernel_of_their_own(
    layer: dict[str, Any], sizes: dict[str, Any], cached: int, steps: list[list[int]], kernel: str
) -> None:
    served = Served(replace(LLAMA, **layer), replace(SIZES, **sizes), HOPPER)
    with served.serving():
        for q_len in steps:
            served.step_after(cached, q_len)
    assert variants_of(served.found, kernel) >= (2 if kernel == "_extend_merge_kernel" else 1)
    served.assert_prewarmed()


@pytest.mark.nightly
def test_on_hopper_decode_has_three_ways_that_hang_on_the_number_of_sequences() -> None:
    """The variants that the tests above cover: each of three kinds of tiles, with and without a store.

    Tiles of 64 keys are merged by a separate launch or within their own; the third kind is tiles of 128.
    """
    assert variants_of(prewarmed(LLAMA, SIZES, "sm_90"), "_decode_kernel") == 6


def test_where_all_steps_are_cut_in_one_way_one_variant_is_compiled() -> None:
    few = replace(SIZES, max_num_seqs=4, max_kv_len=256)
    assert variants_of(prewarmed(LLAMA, few, "sm_90"), "_decode_kernel") == 2


def test_halves_find_theirs() -> None:
    """Halves of a step that is padded to 24 have 12 sequences, which no whole step is padded to."""
    sizes = replace(SIZES, max_num_seqs=24, capture_sizes=(8, 24), split_steps=True)
    served = Served(GEMMA, sizes, "sm_90")
    with served.serving():
        for num_seqs in (2, 8, 9, 23):
            for q_len in lengths_of(num_seqs):
                batch = served.batch(q_len)
                for half in served.runtime.step(batch, served.runtime.plan(batch, halves=2)).parts:
                    served.attend(half)
                served.runtime.end_step()
    served.assert_prewarmed()


@pytest.mark.nightly
def test_rounds_of_drafts_and_their_verification_find_theirs() -> None:
    sizes = replace(SIZES, drafts=(Drafts(1, 2), Drafts(3, 2)), verify_tokens=4)
    served = Served(MASKED, sizes, "sm_90")
    with served.serving():
        for num_seqs in range(1, sizes.max_num_seqs + 1):
            stored = np.zeros(num_seqs, np.int32)
            for drafts, keeps_branches in product(sizes.drafts, (True, False)):
                round_ = served.runtime.step(draft_batch(served.rows[:num_seqs], stored, drafts))
                for number, step in enumerate(round_.parts):
                    if number and keeps_branches:
                        step.keep_branches()
                    elif number:
                        step.set_parents(torch.zeros_like(step.token_ids))
                    served.attend(step)
                served.runtime.end_step()
            parents = torch.tensor([[-1, 0, 0, 1]] * num_seqs, dtype=torch.int32)
            served.step(replace(served.batch([sizes.verify_tokens] * num_seqs), mask=TreeMask(parents)))
            accepted = Accepted.empty(num_seqs, sizes.verify_tokens, CPU)
            for tensor in accepted:
                tensor.zero_()
            served.runtime.move_accepted(accepted)
    for kernel in ("_draft_steps_kernel", "_place_trees_kernel", "_move_paths_kernel"):
        assert variants_of(served.found, kernel) >= 1
    served.assert_prewarmed()


def policy(*seqs: int, **also: Any) -> PaddingPolicy:
    return PaddingPolicy(SizeLadder(seqs), SizeLadder((1,)), **also)


def steps_of(padding: PaddingPolicy, max_seqs: int, max_kv_len: int = 100) -> list[tuple[PaddedShape, list[int]]]:
    return list(eager_steps(padding, max_seqs=max_seqs, max_kv_len=max_kv_len))


def test_there_is_a_step_of_each_padded_number_of_sequences() -> None:
    sizes = [shape.num_seqs for shape, _ in steps_of(policy(1, 4), 6) if shape.kind is StepKind.DECODE]
    assert sizes == [1, 4, 5, 6]
    split = [shape.num_seqs for shape, _ in steps_of(policy(2, 12, max_children=2), 12)]
    assert sorted(set(split)) == [1, 2, 6, 12]


@pytest.mark.parametrize("max_kv_len", [1, 2, 3, 100, 100_000])
@pytest.mark.parametrize("padding", [policy(1, 4, extras=frozenset(Extra)), policy(8, 24, max_children=2)])
def test_steps_are_of_their_kind_and_within_bounds(padding: PaddingPolicy, max_kv_len: int) -> None:
    for shape, q_len in steps_of(padding, 6, max_kv_len):
        assert len(q_len) <= min(6, shape.num_seqs)
        assert 1 <= min(q_len) <= max(q_len) <= max_kv_len
        assert sum(q_len) <= MOST_TOKENS + 1
        if shape.kind.extra is not Extra.MASK:
            assert shape.kind.decodes == (max(q_len) == 1)
            assert shape.kind.mixes == (min(q_len) == 1 < max(q_len))
        if not shape.kind.decodes:
            assert shape.num_tokens == sum(q_len)


def test_prompts_are_met_whose_tokens_at_most_double() -> None:
    alone = [sum(q_len) for shape, q_len in steps_of(policy(1), 1, 100_000) if shape.kind is StepKind.EXTEND]
    mixed = [sum(q_len) for shape, q_len in steps_of(policy(5), 5, 100_000) if shape.kind is StepKind.MIXED]
    assert (alone[0], alone[-1]) == (2, MOST_TOKENS)
    assert (mixed[0], mixed[-1]) == (3, MOST_TOKENS)
    for tokens in (alone, mixed):
        assert all(low < high <= 2 * low for low, high in pairwise(tokens))
