"""Whole steps of a runtime by the kernels for CDNA, as the probe runs them, on a simulated arch."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_ARCHS, EXTEND_CODES
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Indexer, Indexing, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.select import select
from rocm_attn.providers.triton_cdna import TRITONS
from rocm_attn.selection import probe_runs
from rocm_lab.simulator.launcher import ARCHS, simulated
from tests.amd.kernels.attention_cases import build
from tests.amd.kernels.cdna_extend_cases import CASES as EXTENDS
from tests.amd.kernels.cdna_extend_cases import assert_extended, run_cdna_extend

LAYER = Problem(4, 2, 64, torch.bfloat16, 16, v_head_dim=64, scale=0.125, wants_lse=True)
WIDE = replace(LAYER, head_dim=128, v_head_dim=128, scale=128**-0.5)
LATENTS = Problem(20, 1, 576, torch.bfloat16, 16, v_head_dim=512, scale=0.05, wants_lse=True, pool=PoolKind.LATENT)


# A layer, steps of the probe, the kernel that serves them and how many of them it has work in: new sequences, a decode
# over them, a mixed step, and a padded one; for extend, new tokens of which one sees whole blocks of keys.
STEPS = {
    "decode": (LAYER, ((5, 2, 17), (1, 1, 1), (3, 1, 1), (1, 0, 1)), "_cdna_decode_kernel", 3),
    "latents": (LATENTS, ((5, 2, 17), (1, 1, 1), (3, 1, 1)), "_cdna_latent_decode_kernel", 2),
    "extend": (WIDE, ((5, 2, 137), (3, 1, 2)), "_cdna_extend_kernel", 2),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "arch"), [(name, arch) for name in STEPS for arch in (ARCHS if name == "decode" else EXTEND_ARCHS)]
)
def test_the_probes_steps_are_right(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, steps, kernel, num_launches = STEPS[name]
    monkeypatch.setattr(probe_runs, "_STEPS", steps)
    target = replace(known_target(arch), releases=Releases(triton=TRITONS[-1]), compute_units=1)
    selection = select(layer, target, "triton")
    with simulated(arch) as simulation:
        assert probe_runs.random_run(selection, torch.device("cpu")) is None
    assert simulation.kernels.count(kernel) == num_launches


@pytest.mark.nightly
@pytest.mark.parametrize("arch", EXTEND_ARCHS)
@pytest.mark.parametrize(("num_heads", "records"), [(16, False), (128, False), (16, True)])
def test_the_probes_selection_is_right(num_heads: int, records: bool, arch: str) -> None:
    layer = replace(LATENTS, num_q_heads=num_heads, wants_lse=False, indexer=Indexer(4, 64, Indexing(0.1, 2048)))
    if records:
        layer = replace(layer, kv_encoding=KVEncoding(EXTEND_CODES[arch].value), kv_scales=Scales.GROUP)
    target = replace(known_target(arch), releases=Releases(triton=TRITONS[-1]), compute_units=3)
    selection = select(layer, target, "triton")
    with simulated(arch) as simulation:
        assert probe_runs.selected_run(selection, torch.device("cpu")) is None
    assert "_cdna_selected_kernel" in simulation.kernels


@pytest.mark.nightly
@pytest.mark.parametrize("arch", EXTEND_ARCHS)
def test_rows_of_queries_and_of_outputs_may_begin_anywhere(arch: str) -> None:
    """The limits are those of K and V: a caller's q and out have any strides but the last."""
    tensors = build(replace(EXTENDS["short"], spread=False), torch.device("cpu"))
    odd = replace(tensors, q=_at_odd_places(tensors.q), out=_at_odd_places(tensors.out))
    with simulated(arch):
        run_cdna_extend(arch, odd)
    assert_extended(odd)


def _at_odd_places(rows: torch.Tensor) -> torch.Tensor:
    """The same rows [tokens, heads, dim], apart by odd numbers of elements, NaN between them."""
    tokens, heads, dim = rows.shape
    head, token = dim + 1, heads * (dim + 1) + 1 - heads % 2
    held = rows.new_full((tokens * token + 1,), float("nan"))
    apart = held[1:].as_strided((tokens, heads, dim), (token, head, 1), 1)
    assert not any(stride % 2 == 0 for stride in apart.stride())
    return apart.copy_(rows)
