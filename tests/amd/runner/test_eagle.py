"""An EAGLE head drafts from the rows that the model hands over, and changes no token."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from rocm_attn.errors import BadModel
from rocm_attn.runner.engine import Engine
from rocm_attn.runner.loading import LoadedModel
from rocm_attn.runner.options import EngineOptions
from rocm_attn.runner.request import Request
from rocm_attn.runner.speculation.eagle import EagleDrafter
from rocm_attn.runner.speculation.eagle_head import load_head
from tests.amd.runner.test_speculation import BASE, DRAWN, some_requests, without_speculation
from tests.amd.runner.tiny_model import CONFIG, tiny_model, with_windows

SEEDED = replace(BASE, speculative="eagle:seeded")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def drafter_of(engine: Engine) -> EagleDrafter:
    drafter = engine._speculation._drafter  # type: ignore[union-attr]
    assert isinstance(drafter, EagleDrafter)
    return drafter


def assert_lossless(loaded: LoadedModel, options: EngineOptions, requests: Many[Request]) -> Engine:
    expected = Engine(loaded, without_speculation(options)).generate(requests)
    engine = Engine(loaded, options)
    assert engine.generate(requests) == expected
    metrics = engine.report().metrics
    assert 0 < metrics.accepted_drafts < metrics.drafts
    drafter = drafter_of(engine)
    drafter.draft([], ())
    assert drafter._table.num_free_rows == options.max_batch_size
    assert drafter._table.num_free_pages == drafter._table.num_usable_pages
    return engine


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        {"topk": 4, "draft_tokens": 8, "steps_ahead": 1},
        pytest.param({"graphs": True, "draft_tokens": 3, "topk": 2}, marks=pytest.mark.nightly),
        pytest.param({"chunk": 9, "page_size": 1, "steps_ahead": 1}, marks=pytest.mark.nightly),
        pytest.param({"num_pages": 18}, marks=pytest.mark.nightly),
        pytest.param({"draft_tokens": 1}, marks=pytest.mark.nightly),
    ],
)
def test_a_head_changes_no_token(changes: dict[str, Any], loaded: LoadedModel) -> None:
    requests = some_requests(5, new_tokens=24) + some_requests(2, sampling=DRAWN)
    engine = assert_lossless(loaded, replace(SEEDED, **changes), requests)
    assert "num_pages" not in changes or engine.report().metrics.preemptions > 0


@pytest.mark.nightly
def test_a_head_drafts_for_layers_with_windows() -> None:
    assert_lossless(tiny_model(base=with_windows(CONFIG, 9, -1)), replace(SEEDED, topk=2), some_requests(4))


def handing_on(loaded: LoadedModel, directory: Path, *, feature: bool) -> str:
    """A head whose layer adds nothing: its feature is the one that it was given, or the embedding."""
    size = CONFIG.hidden_size
    shapes = {
        "self_attn.q_proj": (32, size),
        "self_attn.k_proj": (16, size),
        "self_attn.v_proj": (16, size),
        "self_attn.o_proj": (size, 32),
        "mlp.gate_proj": (40, size),
        "mlp.up_proj": (40, size),
        "mlp.down_proj": (size, 40),
    }
    tensors = {f"layers.0.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(size)
    nothing, same = torch.zeros(size, size), torch.eye(size)
    tensors["fc.weight"] = torch.cat((nothing, same) if feature else (same, nothing), 1)
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    return f"eagle:{directory}"


@pytest.mark.parametrize(("feature", "steps_ahead"), [(True, 1), (False, 0)])
def test_the_head_gets_each_last_tokens_own_row_and_the_token_after_it(
    feature: bool, steps_ahead: int, loaded: LoadedModel, tmp_path: Path
) -> None:
    """From the feature alone the last token is picked again; from its embedding, what that gives."""
    options = replace(
        SEEDED, speculative=handing_on(loaded, tmp_path, feature=feature), chunk=9, steps_ahead=steps_ahead, page_size=2
    )
    engine, seen = Engine(loaded, options), 0
    drafter = drafter_of(engine)
    draft = drafter.draft

    def checked(decoding: Any, alive: Any) -> Any:
        nonlocal seen
        found = draft(decoding, alive)
        for sequence, _ in decoding:
            last, first = sequence.token_ids[-1], found[sequence.number].token_ids[0]
            of_embedding = loaded.weights.head @ loaded.weights.embedding[last]
            # The last token of a prompt that is left alone by its chunks was not picked.
            if not feature or len(sequence.token_ids) > len(sequence.request.prompt_token_ids):
                assert first == (last if feature else int(of_embedding.argmax()))
                seen += 1
        return found

    drafter.draft = checked  # type: ignore[method-assign]
    requests = some_requests(4, new_tokens=12)
    assert engine.generate(requests) == Engine(loaded, BASE).generate(requests)
    assert seen > 20


def test_a_head_of_another_model_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    handing_on(loaded, tmp_path, feature=True)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    safetensors.torch.save_file({**tensors, "fc.weight": torch.zeros(3, 6)}, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=r"fc.weight has shape \[3, 6\]"):
        load_head(str(tmp_path), loaded)
    del tensors["layers.0.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=r"lacks layers.0.mlp.up_proj.weight; it is no EAGLE-1 head of this model"):
        load_head(str(tmp_path), loaded)
    with pytest.raises(BadModel, match="nowhere is no directory"):
        load_head(str(tmp_path / "nowhere"), loaded)
