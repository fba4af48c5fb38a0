"""Encoders, which keep no KV, and cross attention over what was stored of them: steps of vLLM's against the oracle."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import BadTensor, DeviceFault
from rocm_attn.external import ExternalOptions
from rocm_attn.integrations.vllm.group import GroupLayer, GroupOptions, GroupSizes, KVGroup
from rocm_attn.integrations.vllm.layer_terms import CacheTerms, LayerTerms
from rocm_attn.integrations.vllm.own_tokens import OwnTokens
from rocm_attn.integrations.vllm.steps import CommonMetadata
from tests.amd.integrations.oracle import Scores, attention
from tests.amd.integrations.vllm_runner import discarding

pytestmark = pytest.mark.usefixtures("inference_mode")

HEADS, KV_HEADS, DIM, SCALE, BLOCK = 4, 2, 16, 0.3, 16
SIZES = GroupSizes(num_seqs=4, num_tokens=48, kv_len=64)
NAN = float("nan")


class Layers:
    """Layers of one attention type in vLLM's form, and random rows of theirs."""

    def __init__(self, terms: Sequence[LayerTerms], device: torch.device, cache: Tensor | None = None) -> None:
        self.device, self.random = device, np.random.default_rng(0)
        self.terms = {f"layers.{number}": each for number, each in enumerate(terms)}
        shared = CacheTerms(BLOCK, DIM, torch.float32, torch.float8_e4m3fn)
        kv_cache = torch.empty(0) if cache is None else cache
        one = torch.ones((), device=device)
        self.of_group = {
            name: GroupLayer(
                SimpleNamespace(kv_cache=kv_cache, _k_scale=one, _v_scale=one),
                each.problem(shared),
                each.head_weights,
            )
            for name, each in self.terms.items()
        }

    def rows(self, count: int, heads: int, pads: int = 3) -> Tensor:
        made = torch.from_numpy(self.random.standard_normal((count + pads, heads, DIM))).float().to(self.device)
        made[count:] = NAN
        return made

    def common(self, new: Sequence[int], kv_len: Tensor, table: Tensor, padded: int = 0, most: int = 0) -> Any:
        """Returns a step's metadata. padded: sequences, with a token each"""
        starts = np.cumsum([0, *new])
        ends = np.full(max(padded, len(new)) + 1, starts[-1], np.int32)
        ends[: len(starts)] = starts
        tokens = padded or int(starts[-1])
        return CommonMetadata(
            query_start_loc=torch.from_numpy(ends).to(self.device),
            seq_lens=kv_len,
            num_reqs=len(ends) - 1,
            num_actual_tokens=tokens,
            max_query_len=most or max(new),
            max_seq_len=SIZES.kv_len,
            block_table_tensor=table,
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=self.device),
            causal=False,
        )

    def assert_right(self, name: str, new: Sequence[int], q: Tensor, out: Tensor, kv: Sequence[Any]) -> None:
        """Checks the rows of each sequence, whose tokens see all of its K and V, or as many on both sides."""
        terms, first = self.terms[name], 0
        sinks = None if terms.sinks is None else terms.sinks.double().cpu().numpy()
        side = -1 if terms.sliding_window is None else terms.sliding_window - 1
        scores = Scores(SCALE, causal=False, window_left=side, window_right=side, sinks=sinks)
        for count, (k, v) in zip(new, kv, strict=True):
            here, (keys, values) = slice(first, first + count), (each.double().cpu().numpy() for each in (k, v))
            want, _ = attention(q[here].double().cpu().numpy(), keys, values, scores)
            assert np.allclose(out[here].cpu(), want, atol=3e-5), f"{name}, tokens from {first} on"
            first += count


def options(provider: str, **features: Any) -> GroupOptions:
    return GroupOptions(ExternalOptions(provider=provider, page_strides=True, **features))


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_tokens_of_an_encoder_see_all_of_their_prompt_and_no_other(
    kind: str, device: torch.device, provider: str
) -> None:
    """The layers take turns in the same memory; a cache of another dtype means nothing to them."""
    plain = LayerTerms(HEADS, DIM, SCALE, KV_HEADS, attn_type=kind)
    with_sinks = replace(plain, sinks=torch.linspace(-1, 1, HEADS), kv_cache_dtype="fp8")
    local = [replace(plain, sliding_window=keys) for keys in (1, 4, 12)]
    layers = Layers([plain, plain, with_sinks, *local], device)
    with discarding():
        group = OwnTokens(layers.of_group, SIZES, device, options(provider))
    nothing = torch.zeros(4, 1, dtype=torch.int32, device=device)
    for new in ([9, 1, 17], [5], [1, 1, 1, 1], [1, 0, 1]):
        step = group.begin(layers.common(new, torch.tensor(new, device=device), nothing))
        for name in layers.terms:
            q, k, v = (layers.rows(sum(new), heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
            out = torch.full_like(q, 7.0)
            group.store(name, step, torch.empty(0), k, v)
            group.attend(name, step, torch.empty(0), q, out)
            ends = np.cumsum(new)[:-1].tolist()
            parts = zip(*(each[: sum(new)].tensor_split(ends) for each in (k, v)), strict=True)
            layers.assert_right(name, new, q, out, list(parts))
    group.attention.check_device()


def test_tokens_see_all_that_was_stored_of_their_encoder(device: torch.device, provider: str) -> None:
    """Prompts may be longer than it, and a graph serves any lengths. One without a first block is a warm-up's."""
    cache = torch.full((12, BLOCK, KV_HEADS, 2 * DIM), NAN, device=device).transpose(1, 2)
    layers = Layers([LayerTerms(HEADS, DIM, SCALE, KV_HEADS, attn_type="encoder_decoder")], device, cache)
    group = KVGroup(
        layers.of_group,
        SIZES,
        device,
        replace(options(provider, short_kv=True), has_slots=False, is_cross=True),
    )
    encoded, kv, table = [33, 4, 16], [], torch.zeros(4, 4, dtype=torch.int32, device=device)
    blocks, slots = iter([7, 2, 9, 4, 11]), []
    for seq, length in enumerate(encoded):
        kv.append((layers.rows(length, KV_HEADS, 0), layers.rows(length, KV_HEADS, 0)))
        for page in range(-(-length // BLOCK)):
            table[seq, page] = block = next(blocks)
            slots += [block * BLOCK + at for at in range(min(BLOCK, length - page * BLOCK))]
    lengths = torch.tensor([*encoded, 33], dtype=torch.int32, device=device)  # of the fourth, no block is left
    (name,) = layers.terms
    for number, new in enumerate(([3, 9, 1], [1, 1, 1], [2, 30, 4, 5])):
        step = group.begin(layers.common(new, lengths, table))
        if number == 0:
            k, v = (torch.cat(side) for side in zip(*kv, strict=True))
            for few in ((k[1:], v), (k, v[1:])):
                with pytest.raises(BadTensor, match=f"rows of K and .* of V for {sum(encoded)} slots"):
                    group.store_to(name, cache, *few, torch.tensor(slots, device=device))
            group.store_to(name, cache, k, v, torch.tensor(slots, device=device))
        q = layers.rows(sum(new), HEADS)
        out = torch.full_like(q, 7.0)
        group.attend(name, step, cache, q, out)
        layers.assert_right(name, new[:3], q, out, kv)
        assert not out[sum(new[:3]) : sum(new)].any()
    decode = partial(layers.common, padded=4, most=1)
    table_of_capture = table.clone()
    table.zero_()
    step, q = group.begin_capture(decode([1] * 4, lengths, table)), layers.rows(4, HEADS, 0)
    out = torch.full_like(q, 7.0)
    recording, _ = recorder_for(device).record(lambda: group.attend(name, step, cache, q, out))
    table.copy_(table_of_capture)
    for new in ([1, 1, 1], [1, 1]):
        group.begin(decode(new, lengths, table))
        q.copy_(layers.rows(4, HEADS, 0))
        recording.replay()
        layers.assert_right(name, new, q, out, kv[: len(new)])
    group.attention.check_device()
    group.begin(decode([1, 1], lengths, table))
    k = layers.rows(2, KV_HEADS, 0)
    k[1, 0, 3] = NAN
    group.store_to(name, cache, k, k.nan_to_num(), torch.tensor(slots[:2], device=device))
    with pytest.raises(DeviceFault, match="K or V of a new token was infinite or NaN"):
        group.attention.check_device()
