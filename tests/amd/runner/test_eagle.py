"""An EAGLE head drafts from the rows that the model passes to it, and changes no token."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadModel, BadSetting
from rocm_serve.engine import Engine
from rocm_serve.models.attention_weights import KVHeadWeights
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.mlp_weights import DenseWeights
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request, Sequence
from rocm_serve.speculation.eagle import EagleDrafter
from rocm_serve.speculation.eagle3 import Eagle3Head, is_eagle3, load_head3, seeded_head3
from rocm_serve.speculation.eagle_head import load_head
from tests.amd.runner.families import family_model
from tests.amd.runner.hf_models import load, save
from tests.amd.runner.serving import some_requests, tokens_of
from tests.amd.runner.test_speculation import BASE
from tests.amd.runner.tiny_model import CONFIG, RECURRENCE, each_part_alone, next_to_attention, tiny_model

SEEDED = replace(BASE, speculative="eagle:seeded")
SEEDED3 = replace(BASE, speculative="eagle:seeded3")


def drafter_of(engine: Engine) -> EagleDrafter:
    drafter = engine._speculation._drafter
    assert isinstance(drafter, EagleDrafter)
    return drafter


def num_checked(engine: Engine, requests: list[Request], check: Callable[[Sequence, tuple[int, ...]], bool]) -> int:
    """Serves requests, whose tokens must be those without drafts; returns for how many drafts a check was True."""
    drafter, counted = drafter_of(engine), list[bool]()
    draft = drafter.draft

    def checked(decoding: Any, alive: Any) -> Any:
        found = draft(decoding, alive)
        counted.extend(check(each, found[each.number].token_ids) for each, _ in decoding)
        return found

    drafter.draft = checked  # type: ignore[method-assign]
    assert engine.generate(requests) == Engine(engine._loaded, BASE).generate(requests)
    return sum(counted)


def layer_of_zeros(prefix: str, num_inputs: int) -> dict[str, Tensor]:
    """Returns the matrices of a layer that adds nothing. num_inputs: of its attention"""
    size = CONFIG.hidden_size
    shapes = {
        "self_attn.q_proj": (32, num_inputs),
        "self_attn.k_proj": (16, num_inputs),
        "self_attn.v_proj": (16, num_inputs),
        "self_attn.o_proj": (size, 32),
        "mlp.gate_proj": (40, size),
        "mlp.up_proj": (40, size),
        "mlp.down_proj": (size, 40),
    }
    return {f"{prefix}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}


def handing_on(loaded: LoadedModel, directory: Path, *, feature: bool) -> str:
    """Writes a head whose layer adds nothing: its feature is the one that it was given, or the embedding."""
    size = CONFIG.hidden_size
    tensors = layer_of_zeros("layers.0.", size)
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(size)
    nothing, same = torch.zeros(size, size), torch.eye(size)
    tensors["fc.weight"] = torch.cat((nothing, same) if feature else (same, nothing), 1)
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    return f"eagle:{directory}"


@pytest.mark.parametrize(("feature", "steps_ahead"), [(True, 1), (False, 0)])
def test_the_head_gets_each_last_tokens_own_row_and_the_token_after_it(
    feature: bool, steps_ahead: int, loaded: LoadedModel, tmp_path: Path
) -> None:
    """The feature alone picks the last token again; its embedding picks the token that the embedding leads to."""
    options = replace(
        SEEDED, speculative=handing_on(loaded, tmp_path, feature=feature), chunk=9, steps_ahead=steps_ahead, page_size=2
    )

    def check(sequence: Sequence, drafts: tuple[int, ...]) -> bool:
        last = sequence.token_ids[-1]
        of_embedding = loaded.weights.head @ loaded.weights.embedding[last]
        # The last token of a prompt, if its chunks leave it alone, was not picked.
        if feature and not sequence.num_read:
            return False
        assert drafts[0] == (last if feature else int(of_embedding.argmax()))
        return True

    assert num_checked(Engine(loaded, options), some_requests(4, new_tokens=12), check) > 20


def test_a_model_without_a_layer_like_a_heads_has_no_head_of_eagle_1(loaded: LoadedModel) -> None:
    """A head has attention and an MLP. EAGLE-3's head takes the last attention and the last MLP."""
    alone = tiny_model(base=each_part_alone(CONFIG, RECURRENCE))
    with pytest.raises(BadModel, match=r"has no layer with an MLP that attends to all keys.*use speculative ngram"):
        load_head("seeded", alone)
    (of_head,) = seeded_head3(alone).model.config.layers
    assert (of_head.mixers, of_head.mlp) == (CONFIG.layers[1].mixers, alone.config.layers[-1].mlp)
    both = tiny_model(base=next_to_attention(replace(CONFIG, layers=CONFIG.layers[:1]), RECURRENCE))
    assert load_head("seeded", both).model.config.layers == CONFIG.layers[:1]


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_a_seeded_head_of_eagle_3_has_plain_heads_beside_latent_rows(family: str, tmp_path: Path) -> None:
    latent = load(save(family_model(family), tmp_path))
    plain, drafting = (Engine(latent, options).generate(some_requests(2)) for options in (BASE, SEEDED3))
    assert tokens_of(plain) == tokens_of(drafting)


@pytest.mark.parametrize("options", [SEEDED, replace(SEEDED3, topk=2)])
def test_a_text_goes_on_to_the_end_of_the_context(options: EngineOptions, loaded: LoadedModel) -> None:
    """Drafts after its last tokens would lie past the end."""
    requests = [Request((1, 2, 3), 200), Request(tuple(range(60)), 200)]
    plain, drafting = (Engine(loaded, replace(each, max_kv_len=None)) for each in (BASE, options))
    done = drafting.generate(requests)
    assert [len(each.prompt_token_ids) + len(each.token_ids) for each in done] == [CONFIG.context_len + 1] * 2
    assert done == plain.generate(requests)


def test_a_model_that_chooses_its_keys_has_no_trees(tmp_path: Path) -> None:
    sparse = load(save(family_model("minimax_m3"), tmp_path))
    with pytest.raises(BadSetting, match=r"topk is 2 and the model has layers with an indexer.*; use topk 1"):
        Engine(sparse, replace(SEEDED3, topk=2))


def test_a_head_of_another_model_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    handing_on(loaded, tmp_path, feature=True)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    safetensors.torch.save_file({**tensors, "fc.weight": torch.zeros(3, 6)}, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=r"fc.weight has shape \[3, 6\]"):
        load_head(str(tmp_path), loaded)
    del tensors["layers.0.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=r"lacks layers.0.mlp.up_proj.weight"):
        load_head(str(tmp_path), loaded)
    with pytest.raises(BadModel, match="nowhere is not a directory"):
        load_head(str(tmp_path / "nowhere"), loaded)


KNOWN = tuple(range(3, CONFIG.vocab_size, 2))


def eagle3_files(loaded: LoadedModel, directory: Path, *, row: int, embedding: bool, prefix: str) -> dict[str, Tensor]:
    """Writes a head whose layer adds nothing, over one of three rows of the model's last layer; it knows some tokens.

    Its features are then the model's, so that it picks the model's tokens again, if it knows them.
    """
    size, known = CONFIG.hidden_size, len(KNOWN)
    tensors = layer_of_zeros(prefix, 2 * size)
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = torch.ones(size)
    tensors["fc.weight"] = torch.cat(
        [torch.eye(size) if place == row else torch.zeros(size, size) for place in range(3)], 1
    )
    tensors["norm.weight"] = loaded.weights.final_norm.clone()
    tensors["lm_head.weight"] = loaded.weights.head[list(KNOWN)].clone()
    tensors["d2t"] = torch.tensor(KNOWN) - torch.arange(known)
    tensors["t2d"] = torch.tensor([token in KNOWN for token in range(CONFIG.vocab_size)])
    if embedding:
        tensors["embed_tokens.weight"] = torch.zeros(CONFIG.vocab_size, size)
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "hidden_act": "silu",
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONFIG.context_len,
        "vocab_size": CONFIG.vocab_size,
        "draft_vocab_size": known,
        "tie_word_embeddings": False,
        # The output matrix gets the output of layer 1, and layer 1 gets the output of layer 0.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1 if place == row else 0 for place in range(3)]},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize(
    ("row", "embedding", "prefix"),
    [(0, False, "midlayer."), pytest.param(2, True, "model.layers.0.", marks=pytest.mark.nightly)],
)
def test_a_head_of_eagle_3_gets_the_rows_of_its_layers_and_drafts_tokens_that_it_knows(
    row: int, embedding: bool, prefix: str, loaded: LoadedModel, tmp_path: Path
) -> None:
    eagle3_files(loaded, tmp_path, row=row, embedding=embedding, prefix=prefix)

    def check(sequence: Sequence, drafts: tuple[int, ...]) -> bool:
        last = sequence.token_ids[-1]
        assert set(drafts) <= set(KNOWN)
        if last not in KNOWN or not sequence.num_read:  # the last token of a prompt was not picked
            return False
        assert drafts == (last,) * len(drafts)
        return True

    engine = Engine(loaded, replace(SEEDED, speculative=f"eagle:{tmp_path}", chunk=9))
    assert num_checked(engine, some_requests(6, new_tokens=14), check) > 10


def test_the_layer_of_a_seeded_head_of_eagle_3_is_what_its_formula_says(loaded: LoadedModel) -> None:
    """One sequence, its features and the next tokens go through the layer and through float64 formulas."""
    weights = seeded_head3(loaded)
    of_layer, of_head, size = weights.model.weights.layers[0], weights.model.weights, CONFIG.hidden_size
    (attention,), mlp = of_layer.mixers, of_layer.mlp
    assert isinstance(attention, KVHeadWeights)
    assert isinstance(mlp, DenseWeights)
    assert of_layer.attention_norm is not None
    assert of_layer.mlp_norm is not None
    engine = Engine(loaded, replace(SEEDED3, draft_tokens=1))
    runners = drafter_of(engine).runners
    head, runtime = runners._model, runners._runtime
    assert isinstance(head, Eagle3Head)
    generator, ids = torch.Generator().manual_seed(3), [5, 9, 44, 17, 2]
    head.features[: len(ids)] = torch.randn(len(ids), 3 * size, generator=generator)
    row = runtime.table.admit()
    runtime.table.reserve(row, len(ids))
    step = runtime.step(StepBatch([row], [len(ids)], [len(ids)], ids)).parts[0]
    with torch.no_grad():
        logits, carried = head.taken_in(step)
    runtime.end_step()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt() * weight.double()

    f = head.features[: len(ids)].double() @ weights.fc.double().T
    x = torch.cat(
        (norm(loaded.weights.embedding[ids].double(), of_layer.attention_norm), norm(f, weights.feature_norm)), 1
    )
    heads = (x @ attention.qkv.double().T).view(len(ids), -1, 8)
    angle = torch.arange(len(ids))[:, None] * 10000.0 ** -(torch.arange(4) / 4)
    cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
    near, far = heads[:, :6].chunk(2, -1)
    turned = torch.cat((near * cos - far * sin, far * cos + near * sin), -1)
    k, v = (each.repeat_interleave(2, 1) for each in (turned[:, 4:], heads[:, 6:]))
    scores = torch.einsum("qhd,khd->hqk", turned[:, :4], k) * 8**-0.5
    shares = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf).softmax(-1)
    g = f + torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ attention.out.double().T
    gate, up = (norm(g, of_layer.mlp_norm) @ mlp.gate_up.double().T).chunk(2, -1)
    want = g + (torch.nn.functional.silu(gate) * up) @ mlp.down.double().T
    torch.testing.assert_close(carried[0].double(), want[-1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        logits[0].double(), norm(want[-1], of_head.final_norm) @ of_head.head.double().T, rtol=1e-4, atol=1e-5
    )


def test_a_head_of_eagle_3_of_another_model_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    tensors = eagle3_files(loaded, tmp_path, row=0, embedding=False, prefix="midlayer.")
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(sentence: str, changes: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(BadModel, match=sentence):
            load_head3(str(tmp_path), loaded)

    refused("made for rows of 24 and 99 tokens, and the model has rows of 24 and 64", {"vocab_size": 99}, tensors)
    refused("an EAGLE-3 head must have one layer", {"num_hidden_layers": 2}, tensors)
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 7, 1]}}
    refused(r"eagle_aux_hidden_state_layer_ids is \[0, 7, 1\]; it must be 3 of the model's 2 layers", named, tensors)
    for norm in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        for changes in ({norm: True}, {"eagle_config": {norm: True}}):
            refused(
                rf"json(: eagle_config)?: {norm} is true; only heads where it is false are served", changes, tensors
            )
    refused(
        "layer_ids next to eagle_config, where readers count", {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, tensors
    )
    refused("has fc.bias, which an EAGLE-3 head of this model does not use", {}, {**tensors, "fc.bias": torch.ones(24)})
    refused("lacks fc.weight", {}, {name: each for name, each in tensors.items() if name[:2] != "fc"})
    refused(r"fc.weight has shape \[3, 6\]", {}, {**tensors, "fc.weight": torch.zeros(3, 6)})
    wrong = "d2t must map 31 tokens"
    refused(wrong, {}, {**tensors, "d2t": tensors["d2t"] + 40})
    refused(wrong, {}, {**tensors, "d2t": KNOWN[0] - torch.arange(31)})
    refused(wrong, {}, {**tensors, "d2t": tensors["d2t"][:-1]})
    (tmp_path / "config.json").write_text("{}")
    assert not is_eagle3(str(tmp_path))
    assert not is_eagle3(str(tmp_path / "nowhere"))
