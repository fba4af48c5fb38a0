"""The study of decode in Gluon, executed: it is right, and what lies behind the last key never counts."""

from __future__ import annotations

import pytest
import torch

from tests.amd.offline.gluon_kernels import PAGE, launch_gluon_decode
from tests.amd.offline.gluon_study import CDNA
from tests.amd.simulator.driver import simulated
from tests.amd.tolerances import assert_attention_close

# Less than a page, a page, and one key more than whole rounds of the loop take on either arch.
KV_LENS = (5, 16, 65)
Q_HEADS, KV_HEADS = 6, 2


@pytest.mark.parametrize(
    ("arch", "dim", "blocks"),
    [
        ("gfx942", 128, 2),
        pytest.param("gfx950", 128, 2, marks=pytest.mark.nightly),
        pytest.param("gfx942", 256, 1, marks=pytest.mark.nightly),
        pytest.param("gfx950", 256, 1, marks=pytest.mark.nightly),
    ],
)
def test_the_study_of_decode_is_right(arch: str, dim: int, blocks: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    width = -(-max(KV_LENS) // PAGE)
    q, out = numbers(len(KV_LENS), Q_HEADS, dim), torch.empty(len(KV_LENS), Q_HEADS, dim, dtype=torch.bfloat16)
    pages = torch.randperm(len(KV_LENS) * width, generator=generator).view(len(KV_LENS), width)
    # [K or V, sequence, token, head, dim]
    kv = numbers(2, len(KV_LENS), width * PAGE, KV_HEADS, dim)
    for seq, kv_len in enumerate(KV_LENS):
        kv[:, seq, kv_len:] = float("nan")
    pools = torch.empty(2, pages.numel(), PAGE, KV_HEADS, dim, dtype=torch.bfloat16)
    pools[:, pages] = kv.view(2, len(KV_LENS), width, PAGE, KV_HEADS, dim)

    lengths = torch.tensor(KV_LENS, dtype=torch.int32)
    with simulated(arch):
        launch_gluon_decode(q, pools[0], pools[1], pages.int(), lengths, out, cdna=CDNA[arch], blocks=blocks)

    for seq, kv_len in enumerate(KV_LENS):
        k, v = kv[:, seq, :kv_len].double().repeat_interleave(Q_HEADS // KV_HEADS, dim=2)
        scores = torch.einsum("hd,thd->ht", q[seq].double(), k) / dim**0.5
        want = torch.einsum("ht,thd->hd", scores.softmax(1), v)
        assert_attention_close(out[seq], want, torch.bfloat16)
