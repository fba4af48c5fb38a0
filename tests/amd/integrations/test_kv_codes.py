"""KV transfer between encodings: codes keep their worth where another encoding is stored."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.integrations.kv_passport import KVPassport
from rocm_attn.integrations.kv_transfer import KVImporter
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit
from rocm_attn.problem import KVEncoding, Scales
from rocm_attn.step.kv_scales import KVScales
from tests.amd.integrations.kv_stories import FN, FNUZ, Story, coded, moved, runtime_of
from tests.amd.worlds.problems import indexer, layer


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("scales", [Scales.TOKEN, Scales.HEAD, Scales.LAYER], ids=lambda scales: scales.name)
def test_codes_of_another_gpu_keep_their_worth(scales: Scales, provider: str, device: torch.device) -> None:
    """Attention reads the same values from E4M3FN as from E4M3FNUZ with scales twice as large."""
    there, here = coded(FN, scales), coded(FNUZ, scales)
    source, target = runtime_of(there, device, provider), runtime_of(here, device, provider)
    if scales is not Scales.TOKEN:
        count = 1 if scales is Scales.LAYER else 2
        for number in range(2):
            for runtime, by in ((source, 1.0), (target, 2.0)):
                k, v = torch.linspace(0.01, 0.03, count) * by, torch.linspace(0.02, 0.01, count) * by
                runtime.set_kv_scales(number, KVScales(k, v))
    story = Story(there, device)
    row = story.prefill(source, 19)
    new_row = moved(source, row, 19, target)
    assert KVImporter(target, KVPassport.of(source)).is_exact
    for number in range(2):
        sides = [
            runtime.pool.layer(number).read(torch.from_numpy(runtime.table.pages_of(each)).long().to(device))
            for runtime, each in ((source, row), (target, new_row))
        ]
        for one, other in zip(*sides, strict=True):
            assert torch.equal(one.flatten(0, 1)[:19], other.flatten(0, 1)[:19])
    back = runtime_of(there, device, provider)
    if scales is Scales.TOKEN:  # and back: only 240 has no equivalent
        assert not KVImporter(back, KVPassport.of(target)).is_exact


@pytest.mark.parametrize("there", [KVEncoding.E5M2, FN, FNUZ], ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("here", [KVEncoding.E5M2, FN, FNUZ], ids=lambda encoding: encoding.name)
def test_the_largest_elements_of_tokens_fit_another_encoding(
    there: KVEncoding, here: KVEncoding, device: torch.device
) -> None:
    """Scales of tokens make them the largest codes: 57344 in E5M2, and 448 at most in E4M3."""
    source, target = (runtime_of(coded(encoding, Scales.TOKEN), device, "torch") for encoding in (there, here))
    row = Story(coded(there, Scales.TOKEN), device).prefill(source, 19)
    new_row = moved(source, row, 19, target)
    sides = [
        runtime.pool.layer(0).read(torch.from_numpy(runtime.table.pages_of(each)).long().to(device))
        for runtime, each in ((source, row), (target, new_row))
    ]
    for one, other in zip(*sides, strict=True):
        given, found = one.flatten(0, 1)[:19], other.flatten(0, 1)[:19]
        # Half a step of three bits of mantissa, or of two, beside the steps of the smallest codes.
        torch.testing.assert_close(found, given, rtol=2**-4 if here is not KVEncoding.E5M2 else 2**-3, atol=1e-4)
        if here is not KVEncoding.E5M2:
            largest = given.abs() == given.abs().amax(-1, keepdim=True)
            torch.testing.assert_close(found[largest], given[largest], rtol=1e-6, atol=0)


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("kv_len", [19, 1, 3])
def test_index_keys_in_codes_of_another_gpu_keep_their_worth(kv_len: int, provider: str, device: torch.device) -> None:
    """A key represents four tokens: fewer tokens send none."""
    pooled = indexer(Indexing(0.25, top=3, key_tokens=4, last_unit=LastUnit.ADDED))
    there, here = ([layer(replace(pooled, key_encoding=encoding, key_scales=Scales.TOKEN))] for encoding in (FN, FNUZ))
    story, source = Story(there, device), runtime_of(there, device, provider)
    target = runtime_of(here, device, provider)
    row = story.prefill(source, kv_len)
    new_row = moved(source, row, kv_len, target)
    assert all(map(torch.equal, story.decode(source, row, kv_len), story.decode(target, new_row, kv_len)))


@pytest.mark.fast(interpreted=0)
def test_codes_are_recoded_a_part_at_a_time(
    provider: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are 32 bytes."""
    monkeypatch.setattr("rocm_attn.integrations.kv_transfer._RECODED_AT_ONCE", 100)
    test_codes_of_another_gpu_keep_their_worth(Scales.HEAD, provider, device)
