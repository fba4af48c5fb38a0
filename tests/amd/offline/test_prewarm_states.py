"""Prewarming compiles the kernels of recurrent layers that steps of decode, verification and prompts launch.

Compiles are recorded instead of done, by the key under which Triton keeps a variant.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture import prewarm as capture_prewarm
from rocm_attn.capture.prewarm import prewarm
from rocm_attn.cli import DONE, main
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.states.arguments import Update
from rocm_attn.machine.target import Target, known_target
from rocm_attn.paging.state_pool import RecurrentLayers
from rocm_attn.problem import Problem
from rocm_attn.recurrence import Convolution, Recurrence
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.offline.compiling import ONLY_OLDEST
from tests.amd.offline.offline_driver import launched_offline
from tests.amd.offline.test_prewarm_sizes import HOPPER, Variant, noted_variants
from tests.amd.runner.hf_models import PUBLISHED

CPU, BF16 = torch.device("cpu"), torch.bfloat16
ATTENTION = Problem(8, 2, 64, BF16, 16, v_head_dim=64, scale=0.125)
GATED_DELTA = Recurrence(4, 2, 64, 64, BF16, convolution=Convolution(2 * 2 * 64 + 4 * 64), normalises=True)
KIMI = Recurrence(
    4, 4, 32, 32, BF16, channel_decay=True, convolution=Convolution(3 * 4 * 32), normalises=True, scale=1.0
)
MAMBA = Recurrence(8, 1, 64, 32, BF16, update=Update.SUM, convolution=Convolution(2 * 64 + 8 * 32), scale=1.0)
ALONE = Recurrence(2, 2, 24, 40, BF16)
LAYERS = (GATED_DELTA, KIMI, GATED_DELTA, MAMBA, ALONE, GATED_DELTA)
# Those that Hopper's own kernels take, which are for the oldest Triton.
HOPPERS_LAYERS = (
    replace(GATED_DELTA, k_dim=128, v_dim=128, convolution=Convolution(2 * 2 * 128 + 4 * 128)),
    replace(KIMI, k_dim=128, v_dim=128, convolution=Convolution(3 * 4 * 128)),
    replace(MAMBA, k_dim=128, v_dim=64, convolution=Convolution(2 * 128 + 8 * 64)),
)
KEPT = 4
SIZES = RuntimeOptions(
    num_pages=200, max_num_seqs=3, max_kv_len=512, provider="triton", capture_sizes=(1, 3), verify_tokens=KEPT
)
KERNELS = {
    "_state_places_kernel",
    "_convolve_kernel",
    "_token_steps_kernel",
    "_chunk_rows_kernel",
    "_chunk_walk_kernel",
}
HOPPERS_KERNELS = {"_hopper_chunk_rows_kernel", "_hopper_chunk_walk_kernel"}
# New tokens of the sequences of steps: decode, verification of up to as many drafts as a state keeps, and prompts.
STEPS = ([1], [1, 1, 1], [2, 1], [3, 4, 1], [4, 4, 4], [5, 1], [7], [11, 13], [15, 15, 15], [16], [40, 1], [300, 9, 1])


def prewarmed(recurrent: RecurrentLayers, target: Target, options: RuntimeOptions = SIZES) -> set[Variant]:
    """Returns the variants of kernels of states that prewarming compiles."""
    found = set[Variant]()
    with noted_variants(found):
        prewarm([ATTENTION], target, options, recurrent, device=CPU)
    return of_states(found)


def of_states(found: set[Variant]) -> set[Variant]:
    return {variant for variant in found if variant[0] in KERNELS | HOPPERS_KERNELS}


def go_on(part: Part, layers: Sequence[Recurrence], gates: int) -> None:
    """One forward of recurrent layers, whose q, k and v are views of what the convolution has written.

    gates: elements of a row from which x is cut
    """
    num_tokens = len(part.token_ids)
    for layer, form in enumerate(layers):
        keys, values = form.num_k_heads * form.k_dim, form.num_heads * form.v_dim
        channels = form.convolution.channels
        convolved = torch.empty(num_tokens, 2 * keys + values, dtype=form.dtype)
        if channels:
            weight = torch.empty(channels, form.convolution.width, dtype=form.dtype)
            bias = torch.empty(channels, dtype=form.dtype) if form.update is Update.SUM else None
            x = torch.empty(num_tokens, channels + gates, dtype=form.dtype)[:, :channels]
            part.states.convolve(layer, x, weight, bias, convolved)
            q, k, v = torch.split(convolved, [keys, keys, values], dim=1)
        else:
            q, k, v = (torch.empty(num_tokens, width, dtype=form.dtype) for width in (keys, keys, values))
        decays = (form.k_dim,) if form.channel_decay else ()
        part.states.recur(
            layer,
            q.view(num_tokens, form.num_k_heads, form.k_dim),
            k.view(num_tokens, form.num_k_heads, form.k_dim),
            v.view(num_tokens, form.num_heads, form.v_dim),
            torch.empty(num_tokens, form.num_heads, *decays),
            torch.empty(num_tokens, form.num_heads),
            torch.empty(num_tokens, form.num_heads, form.v_dim, dtype=form.dtype),
        )


def served(recurrent: RecurrentLayers, target: Target, options: RuntimeOptions = SIZES) -> set[Variant]:
    """Returns the variants of kernels of states that steps of a runtime of all layers launch, in the first ones."""
    guards = Guards().without("echo_check")  # kernels that are only compiled compute no answer
    runtime: AttentionRuntime = build_runtime([ATTENTION], options, recurrent, device=CPU, target=target, guards=guards)
    found = set[Variant]()
    with noted_variants(found), launched_offline(target.arch):
        for q_len in STEPS:
            rows, new = [runtime.table.admit() for _ in q_len], np.array(q_len, np.int32)
            runtime.table.reserve_all(np.array(rows, np.int32), new)
            with runtime.step(StepBatch(np.array(rows, np.int32), new, new)) as step:
                for gates in (0, 8, 16):
                    go_on(step.parts[0], recurrent.layers[: len(LAYERS)], gates)
            for row in rows:
                runtime.table.free(row)
    return of_states(found)


@pytest.mark.parametrize(
    "target", [known_target("gfx942"), known_target("sm_90"), HOPPER], ids=["gfx942", "sm_90", "hopper"]
)
def test_steps_launch_the_variants_that_were_compiled(target: Target) -> None:
    recurrent = RecurrentLayers(LAYERS, kept=KEPT)
    compiled, launched = prewarmed(recurrent, target), served(recurrent, target)
    assert sorted(name for name, _ in launched - compiled) == []
    assert {name for name, _ in launched} == KERNELS
    # A layer may give its convolution a bias or none: each of them gave one of the two.
    assert {name for name, _ in compiled - launched} == {"_convolve_kernel"}


@pytest.mark.parametrize("layers", [pytest.param(HOPPERS_LAYERS, id="oldest", marks=ONLY_OLDEST)])
def test_hoppers_own_kernels_are_compiled_too(layers: tuple[Recurrence, ...]) -> None:
    recurrent = RecurrentLayers(layers, kept=KEPT)
    compiled, launched = prewarmed(recurrent, HOPPER), served(recurrent, HOPPER)
    assert sorted(name for name, _ in launched - compiled) == []
    assert {name for name, _ in launched} == KERNELS - {"_chunk_walk_kernel"} | HOPPERS_KERNELS


def test_a_deterministic_model_takes_tokens_one_by_one() -> None:
    recurrent, options = RecurrentLayers(LAYERS, kept=KEPT), replace(SIZES, deterministic=True)
    compiled, launched = (of(recurrent, known_target("gfx942"), options) for of in (prewarmed, served))
    assert launched <= compiled
    assert {name for name, _ in compiled} == KERNELS - {"_chunk_rows_kernel", "_chunk_walk_kernel"}


@pytest.mark.parametrize("way", ["rows", "checkpoints", "layers"])
def test_slots_above_2_gib_have_variants_of_their_own_on_amd(way: str) -> None:
    """Rows, checkpoints or layers may be many: prewarming has one layer of each kind, and slots to just above 2 GiB."""
    target, few = known_target("gfx942"), RecurrentLayers((GATED_DELTA,), kept=KEPT)
    options = replace(SIZES, max_num_rows={"rows": 20_000, "layers": 60}.get(way, 0))
    many = {
        "rows": few,
        "checkpoints": replace(few, checkpoints=40_000),
        "layers": replace(few, layers=(GATED_DELTA,) * 300),
    }[way]
    compiled = prewarmed(many, target, options)
    assert served(many, target, options) <= compiled
    small = prewarmed(few, target)
    assert (
        {name for name, _ in compiled - small}
        == {name for name, _ in small - compiled}
        == {"_convolve_kernel", "_token_steps_kernel", "_chunk_walk_kernel"}
    )


def test_rounds_and_masks_which_states_refuse_are_left_out() -> None:
    masked = replace(ATTENTION, custom_mask=True)
    options, found = replace(SIZES, drafts=(Drafts(2, 2),)), set[Variant]()
    with noted_variants(found):
        prewarm([masked], known_target("gfx942"), options, RecurrentLayers((GATED_DELTA,), kept=KEPT), device=CPU)
    names = {name for name, _ in found}
    assert names >= KERNELS
    assert not names & {"_draft_steps_kernel", "_place_trees_kernel", "_pack_mask_kernel"}


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("bamba-9b-v2", (128, 1, 128, 64)),
        ("falcon-h1-7b-instruct", (24, 1, 256, 128)),
        ("nemotron-h-8b-base-8k", (128, 8, 128, 64)),
    ],
)
def test_the_command_compiles_for_the_recurrent_layers_of_a_config(
    model: str,
    sizes: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """sizes: heads, heads of k, and their elements"""
    given = list[RecurrentLayers]()

    def steps(runtime: AttentionRuntime, *_: object, **__: object) -> None:
        given.append(runtime.states.recurrent)

    monkeypatch.setattr(capture_prewarm, "run_every_kernel", steps)
    (tmp_path / "config.json").write_text((PUBLISHED / f"{model}.json").read_text())
    command = ["prewarm", str(tmp_path), "--arch", "gfx942", "--max-batch-size", "4", "--verify-tokens", "3", "--json"]
    assert main(command) == DONE
    assert json.loads(capsys.readouterr().out)["arch"] == "gfx942"
    (recurrent,) = given
    (layer,) = recurrent.layers
    assert layer.update is Update.SUM
    assert (layer.num_heads, layer.num_k_heads, layer.k_dim, layer.v_dim) == sizes
    assert recurrent.kept == 3
