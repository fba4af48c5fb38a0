"""Steps of vLLM's and SGLang's runners launch no kernel that our plug-ins have not run before the first request.

Compiles for an absent GPU are recorded instead of done, by the key under which Triton keeps a variant. Nothing runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn import external
from rocm_attn.capture import engine_kernels
from rocm_attn.capture.engine_kernels import StepsAhead, run_ahead
from rocm_attn.external import ExternalAttention, ExternalOptions
from rocm_attn.guards.registry import Guards
from rocm_attn.integrations.sglang.hooks import AttentionHooks
from rocm_attn.integrations.vllm import group as vllm_group
from rocm_attn.integrations.vllm.group import GroupLayer, GroupOptions, GroupSizes, KVGroup
from rocm_attn.integrations.vllm.layer_terms import CacheTerms, LayerTerms, MaskTerms
from rocm_attn.integrations.vllm.steps import CommonMetadata
from rocm_attn.machine.target import Target, known_target
from tests.amd.integrations import sglang_stand_in
from tests.amd.integrations.sglang_stand_in import Engine, Mode
from tests.amd.offline.offline_driver import launched_offline
from tests.amd.offline.test_prewarm_sizes import HOPPER, Variant, names_of, noted_variants

CPU, CDNA = torch.device("cpu"), known_target("gfx942")
SEQS, TOKENS, LONGEST, BLOCK, NUM_BLOCKS = 24, 1024, 2048, 16, 200
LLAMA = LayerTerms(32, 128, 128**-0.5, 8)
STEPS = 60

RanAhead = Callable[[ExternalAttention, StepsAhead], None]


@contextmanager
def on_an_absent_gpu(target: Target) -> Iterator[None]:
    """While active, attention is built for a target, and launches are recorded. No fault of a device is looked for."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (external, vllm_group):
            patch.setattr(module, "detect_target", lambda device: target)
        patch.setattr(external, "guards_from_settings", lambda: Guards().without("echo_check"))
        patch.setattr(ExternalAttention, "check_device", lambda attention: None)
        patch.setattr(torch, "empty", torch.zeros)
        with launched_offline(target.arch):
            yield


def new_tokens(random: np.random.Generator) -> list[int]:
    """The new tokens of a random step's sequences: decodes, one prompt among them, prompts alone, verified drafts."""
    num_seqs = min(SEQS, int(2 ** random.uniform(0, 5)))
    room = int(2 ** random.uniform(1, 10))
    kind = random.integers(4)
    if kind == 0:
        return [1] * num_seqs
    if kind == 1:
        return [1] * (num_seqs - 1) + [max(1, min(room, TOKENS - num_seqs))]
    most = max(1, min(room, TOKENS // num_seqs) if kind == 2 else 4)
    return [int(each) for each in random.integers(1, most + 1, num_seqs)]


class VllmSteps:
    """A group of vLLM's layers over one packed cache each, and random steps of it."""

    def __init__(self, terms: Sequence[LayerTerms], mask: MaskTerms, ran_ahead: RanAhead) -> None:
        cache = CacheTerms(BLOCK, 128, torch.bfloat16, torch.float8_e4m3fn)
        self.layers: dict[str, Any] = {
            f"layers.{number}": SimpleNamespace(
                kv_cache=torch.zeros(
                    NUM_BLOCKS,
                    BLOCK,
                    8,
                    256,
                    dtype=torch.bfloat16 if each.kv_cache_dtype == "auto" else torch.uint8,
                ).transpose(1, 2),
                _k_scale=torch.ones(()),
                _v_scale=torch.ones(()),
                terms=each,
            )
            for number, each in enumerate(terms)
        }
        of_group = {
            name: GroupLayer(each, each.terms.problem(cache, mask), each.terms.head_weights)
            for name, each in self.layers.items()
        }
        options = GroupOptions(ExternalOptions(provider="triton"), ran_ahead=ran_ahead)
        self.group = KVGroup(of_group, GroupSizes(SEQS, TOKENS, LONGEST), CPU, options)
        self.table = torch.zeros(SEQS, LONGEST // BLOCK, dtype=torch.int32)

    def step(self, new: Sequence[int], cached: int) -> None:
        """Runs a step. new: new tokens of each sequence; cached: tokens that each has in the cache, at most"""
        num_tokens, longest = sum(new), min(LONGEST, cached + max(new))
        step = self.group.begin(
            CommonMetadata(
                torch.tensor([0, *np.cumsum(new)], dtype=torch.int32),
                torch.tensor([min(LONGEST, cached + each) for each in new], dtype=torch.int32),
                len(new),
                num_tokens,
                max(new),
                longest,
                self.table[: len(new)],
                torch.zeros(TOKENS, dtype=torch.int64)[:num_tokens],
                True,
                mm_req_doc_ranges={},
            )
        )
        q, k, v, out = (torch.zeros(num_tokens, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8, 32))
        for name, layer in self.layers.items():
            self.group.store(name, step, layer.kv_cache, k, v)
            self.group.attend(name, step, layer.kv_cache, q, out)


class SglangSteps:
    """The hooks of an SGLang model's runner, and random steps of it."""

    def __init__(self, fields: dict[str, Any], ran_ahead: RanAhead) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sglang_stand_in, "NUM_ROWS", SEQS + 1)
            patch.setattr(sglang_stand_in, "ROOM", LONGEST)
            self.engine = Engine("triton", CPU, serve=False, page_size=BLOCK, **fields)
        serving = replace(self.engine.serving, ran_ahead=ran_ahead)
        self.hooks = AttentionHooks(self.engine.runner, serving)

    def step(self, new: Sequence[int], cached: int) -> None:
        """Runs a step. new: new tokens of each sequence; cached: tokens that each has in the cache, at most"""
        count, lens = len(new), torch.tensor([min(LONGEST, cached + each) for each in new])
        batch: Any = SimpleNamespace(
            forward_mode=Mode.DECODE if max(new) == 1 else Mode.EXTEND,
            batch_size=count,
            req_pool_indices=torch.arange(1, count + 1),
            seq_lens=lens,
            seq_lens_cpu=lens,
            out_cache_loc=torch.zeros(sum(new), dtype=torch.int64),
            extend_seq_lens=torch.tensor(new, dtype=torch.int32),
            extend_seq_lens_cpu=list(new),
            mm_inputs=None,
            spec_info=None,
        )
        self.run(batch, new)

    def run(self, batch: Any, new: Sequence[int]) -> None:
        self.hooks.init_forward_metadata(batch)
        self.engine.forward(self.engine.step_of(batch, new), self.hooks)


class SglangTrees(SglangSteps):
    """An SGLang model whose drafts are verified as trees, without graphs."""

    TOKENS = 6

    def __init__(self, ran_ahead: RanAhead) -> None:
        super().__init__({"with_trees": True, "draft_tokens": self.TOKENS}, ran_ahead)

    def step(self, new: Sequence[int], cached: int) -> None:
        """Runs a step; if its sequences have several new tokens each, they are trees of drafts."""
        if min(new) == 1:
            super().step(new, cached)
            return
        count, num_tokens = len(new), len(new) * self.TOKENS
        cached = min(cached, LONGEST - self.TOKENS)
        batch: Any = SimpleNamespace(
            forward_mode=Mode.TARGET_VERIFY,
            batch_size=count,
            req_pool_indices=torch.arange(1, count + 1),
            seq_lens=torch.full((count,), cached),
            seq_lens_cpu=None,
            out_cache_loc=torch.zeros(num_tokens, dtype=torch.int64),
            positions=torch.zeros(num_tokens, dtype=torch.int64),
            spec_info=SimpleNamespace(
                draft_token_num=self.TOKENS,
                topk=2,
                custom_mask=torch.ones(num_tokens * (cached + self.TOKENS), dtype=torch.bool),
            ),
        )
        self.run(batch, [self.TOKENS] * count)


def run_and_keep(kept: set[Variant], attention: ExternalAttention, ahead: StepsAhead) -> None:
    with noted_variants(kept):
        run_ahead(attention, ahead)


def ahead_and_served(new_engine: Callable[[RanAhead], Any], target: Target) -> tuple[set[Variant], set[Variant]]:
    """Returns the variants that are run before an engine's first step, and those of its random steps."""
    ahead, served, random = set[Variant](), set[Variant](), np.random.default_rng(0)
    with on_an_absent_gpu(target):
        engine = new_engine(partial(run_and_keep, ahead))
        with noted_variants(set()):
            engine.step([1], 1)  # vLLM's group is made in it
        with noted_variants(served):
            for _ in range(STEPS):
                engine.step(new_tokens(random), int(2 ** random.uniform(0, 11)))
    return ahead, served


PLAIN, SPANS = MaskTerms(), MaskTerms(spans=True, spans_pass_window=True)
SINKS = replace(LLAMA, sliding_window=128, sinks=torch.zeros(32))


@pytest.mark.parametrize(
    ("terms", "mask", "target"),
    [
        pytest.param([LLAMA], PLAIN, HOPPER, marks=pytest.mark.nightly),  # "FP8" has its steps
        ([LLAMA, SINKS], PLAIN, CDNA),
        ([replace(LLAMA, kv_cache_dtype="fp8")], PLAIN, HOPPER),
        ([LLAMA], SPANS, CDNA),
    ],
    ids=["plain", "windows", "FP8", "spans"],
)
def test_vllms_steps_launch_nothing_that_was_not_run_ahead(
    terms: list[LayerTerms], mask: MaskTerms, target: Target
) -> None:
    ahead, served = ahead_and_served(partial(VllmSteps, terms, mask), target)
    assert names_of(served - ahead) == []
    assert {"_publish_engine_kernel", "_take_slots_kernel", "_store_kernel", "_decode_kernel"} <= set(names_of(ahead))
    assert len(served) > 10


@pytest.mark.parametrize(
    ("fields", "target"),
    [({}, CDNA), ({"windows": (-1, 5), "with_window_pool": True}, HOPPER), ({"is_latent": True}, HOPPER)],
    ids=["plain", "pools", "latent"],
)
def test_neither_do_sglangs(fields: dict[str, Any], target: Target) -> None:
    ahead, served = ahead_and_served(partial(SglangSteps, fields), target)
    assert names_of(served - ahead) == []
    assert {"_publish_engine_kernel", "_gather_table_kernel"} <= set(names_of(served))


@pytest.mark.parametrize("target", [CDNA, HOPPER], ids=["CDNA", "Hopper"])
def test_neither_do_trees_of_drafts(target: Target) -> None:
    ahead, served = ahead_and_served(SglangTrees, target)
    assert names_of(served - ahead) == []
    assert "_pack_mask_kernel" in names_of(served)


def test_a_number_of_sequences_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_kernels, "_num_seqs", lambda most: [most])
    ahead, served = ahead_and_served(partial(VllmSteps, [LLAMA], PLAIN), CDNA)
    assert {"_merge_kernel", "_extend_merge_kernel"} <= set(names_of(served - ahead))
