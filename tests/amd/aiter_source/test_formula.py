"""The formula that judges AITER's kernels agrees with the project's reference, and with results written by hand."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.machine.releases import Release
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.problem import Problem
from rocm_attn.step.head_weights import HeadWeights
from tests.amd.aiter_source.checkout import VARIABLE, Checkout, release_of
from tests.amd.aiter_source.dense import dense_attention
from tests.amd.worlds.problems import small_problem


def test_two_keys_share_by_their_logits() -> None:
    problem = Problem(1, 1, 1, torch.float32, 1, v_head_dim=1, scale=1.0)
    q, k, v = (torch.tensor(rows).reshape(-1, 1, 1) for rows in ([2.0], [0.0, 1.0], [10.0, 20.0]))
    share = torch.tensor([2.0], dtype=torch.float64).sigmoid()
    assert torch.allclose(dense_attention(q, k, v, problem, HeadWeights()).flatten(), 10 + 10 * share)
    only_its_own = dense_attention(q, k, v, replace(problem, window_left=0), HeadWeights())
    assert only_its_own.item() == 20.0


@pytest.mark.parametrize(
    "problem",
    [
        small_problem(),
        small_problem(window_left=3, has_sinks=True),
        small_problem(logits_soft_cap=1.5, has_alibi_slopes=True),
    ],
    ids=["plain", "window-sinks", "soft_cap-slopes"],
)
def test_the_formula_and_the_oracle_agree(problem: Problem) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = HeadWeights.random(problem, generator)
    q, k, v = (torch.randn(n, h, 16, generator=generator) for n, h in ((5, 6), (20, 2), (20, 2)))
    want, _ = attend_sequence(q, k, v, problem, weights)
    torch.testing.assert_close(dense_attention(q, k, v, problem, weights), want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("commit", "release"),
    [
        ("v0.1.20-0-gfc2e5d57fb", "0.1.20"),
        ("v0.1.19.post1-0-g123", "0.1.19.post1"),
        ("v0.1.20-46-ge40", "0.1.21.dev0"),
        ("v0.1.19.post2-139-gc16", "0.1.19.post3.dev0"),
    ],
)
def test_a_commit_belongs_to_its_tag_or_to_the_next_release(commit: str, release: str) -> None:
    assert release_of(commit) == Release.of(release)


def test_a_checkout_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ValueError, match="AITER_SOURCE is not set; set it to the folder of a checkout"):
        Checkout.named()
    monkeypatch.setenv(VARIABLE, "/")
    with pytest.raises(ValueError, match="has no aiter/ops/triton; name a checkout of ROCm/aiter"):
        Checkout.named()
