"""Each tensor-parallel rank's part of a model, and that all parts together give the results of the whole model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import Unsupported
from rocm_attn.models.cut import cost_of_cut
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.mlp_config import ExpertMlp
from rocm_attn.models.shards import Shard, ShardRange
from rocm_attn.models.tensors import Shape, TensorSource
from rocm_serve.models.linears import linears_over
from rocm_serve.models.loading import load_model, open_model
from rocm_serve.models.mlp_weights import ExpertWeights
from rocm_serve.models.weight_bytes import matrices_of
from rocm_serve.models.weights import expected_shapes, load_weights
from rocm_serve.peer_sums import NoSmallSums
from rocm_serve.ranks import Ranks, RanksOfGroup
from tests.amd.runner.families import FAMILIES, family_model
from tests.amd.runner.hf_models import hf_logits, random_tokens, save, small_hf_model, write_gguf
from tests.amd.runner.served_logits import served_logits
from tests.amd.runner.thread_ranks import ThreadRank, on_threads
from tests.amd.runner.tiny_model import CONFIG, with_attention
from tests.amd.tolerances import assert_layers_close

CPU = torch.device("cpu")
NINE_OVER_THREE = AttentionLayer(num_q_heads=9, num_kv_heads=3, head_dim=8, scale=8**-0.5)


def test_the_cost_of_a_cut_is_said() -> None:
    smollm2 = replace(CONFIG, layers=(with_attention(NINE_OVER_THREE),), vocab_size=49152)
    assert Shard(3, 4).heads(9, 3).q == ShardRange(9, 9, 3)
    assert cost_of_cut(smollm2, 1) == ()
    assert cost_of_cut(smollm2, 4) == ("9 query heads over 3 KV heads are padded to 12 over 4, 25% of them zeros",)
    assert cost_of_cut(CONFIG, 4)[0] == "4 query heads over 2 KV heads: each KV head is held by 2 ranks"
    assert cost_of_cut(replace(CONFIG, vocab_size=101), 2) == (
        "the output matrix of 101 tokens is padded to 112, 10% of them zeros",
    )


PROMPT_LEN = 9


def logits_of_ranks(directory: Path, texts: list[Tensor], num_ranks: int) -> list[list[dict[int, Tensor]]]:
    """rank -> text -> place -> logits, served in chunks and token by token."""

    def serve(rank: ThreadRank) -> list[dict[int, Tensor]]:
        loaded = load_model(directory, dtype=torch.float32, device=CPU, ranks=rank)
        logits, _ = served_logits(loaded, texts, [PROMPT_LEN] * len(texts), chunk=5, page_size=4, graphs=False)
        return logits

    return on_threads(num_ranks, serve)


@pytest.mark.fast(3)
@pytest.mark.parametrize("num_ranks", [3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gives_the_logits_of_transformers_on_every_rank(
    family: str, num_ranks: int, tmp_path: Path
) -> None:
    """4 query heads, 2 KV heads, MLPs of 80 or 24 and 101 tokens: 3 ranks divide none of these, 8 ranks few."""
    torch.manual_seed(3)
    reference = family_model(family)
    texts = [random_tokens(12), random_tokens(7)]
    expected = [hf_logits(reference, text) for text in texts]
    of_ranks = logits_of_ranks(save(reference, tmp_path), texts, num_ranks)
    for of_text, logits in zip(of_ranks[0], expected, strict=True):
        for place, row in of_text.items():
            assert_layers_close(row, logits[place])
    for others in of_ranks[1:]:
        for one, other in zip(of_ranks[0], others, strict=True):
            assert all(torch.equal(row, other[place]) for place, row in one.items()), "ranks pick from the same bits"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bamba", {"mamba_n_groups": 2}),
        ("falcon_h1", {"mamba_n_groups": 2, "mamba_norm_before_gate": True, "mamba_proj_bias": True}),
        ("falcon_h1", {"mamba_rms_norm": False, "projectors_bias": True}),
        ("nemotron_h", {"n_groups": 2, "moe_latent_size": 20}),
    ],
    ids=str,
)
def test_each_rank_has_a_group_of_mambas_heads(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(3)
    reference, text = family_model(family, **settings), random_tokens(12)
    expected = hf_logits(reference, text)
    (first,), (second,) = logits_of_ranks(save(reference, tmp_path), [text], 2)
    for at, row in first.items():
        assert_layers_close(row, expected[at])
        assert torch.equal(row, second[at])


def test_ranks_that_do_not_divide_a_model_are_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("rocm_serve.models.loading.load_weights")
    directory, ranks = save(family_model("nemotron_h", n_groups=2), tmp_path), Ranks()
    ranks.shard = Shard(0, 3)
    with pytest.raises(Unsupported, match=r"Mamba2's 2 groups, .* not divided over 3 ranks"):
        load_model(directory, dtype=torch.float32, device=CPU, ranks=ranks)


@pytest.mark.fast
@pytest.mark.parametrize(
    "settings", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str
)
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_ties_biases_and_rows_in_ggufs_order_are_cut_right(
    kind: str, settings: dict[str, bool], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    reference = small_hf_model("Llama", **settings)
    place = save(reference, tmp_path) if kind == "safetensors" else write_gguf(reference, tmp_path / "model.gguf")
    text = random_tokens(12)
    (of_text,) = logits_of_ranks(place, [text], 3)[2]
    expected = hf_logits(reference, text)
    for at, row in of_text.items():
        assert_layers_close(row, expected[at])


@pytest.mark.fast(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_a_ranks_weights_are_known_before_they_are_read(family: str, tmp_path: Path) -> None:
    files = open_model(save(family_model(family), tmp_path))
    for num_ranks in (1, 2, 3):
        shard = Shard(0, num_ranks)
        read = load_weights(files.source, files.config, dtype=torch.float32, device=CPU, shard=shard).num_bytes
        # Factors of Gemma 4's router are folded into its matrix.
        assert matrices_of(files.config.on_one_of(num_ranks), torch.float32, num_ranks).num_bytes == pytest.approx(
            read, rel=0.003
        )


@pytest.mark.parametrize(
    ("family", "rows", "experts"), [("qwen3_next", 7, 7), ("deepseek_v32", 8, 9), ("deepseek_v3", 8, 8)]
)
def test_a_shared_mlp_of_an_experts_size_is_one_of_the_experts(
    family: str, rows: int, experts: int, tmp_path: Path
) -> None:
    """The router has a row for its share if that is not 1. DeepSeek's two shared experts are no expert's size."""
    files = open_model(save(family_model(family), tmp_path))
    for rank in range(2):
        shard = Shard(rank, 2)
        weights = load_weights(files.source, files.config, dtype=torch.float32, device=CPU, shard=shard).layers[-1].mlp
        assert isinstance(weights, ExpertWeights)
        assert (len(weights.router), len(weights.gate_up), len(weights.down)) == (rows, experts, experts)
        assert (weights.shared is None) == (family != "deepseek_v3")


class Counted:
    """A TensorSource that counts the elements that are read of each tensor."""

    def __init__(self, source: TensorSource) -> None:
        self.name = source.name
        self.num_read: dict[str, int] = {}
        self._source = source

    def shapes(self) -> Mapping[str, Shape]:
        return self._source.shapes()

    def read(self, name: str, *where: slice) -> Tensor:
        tensor = self._source.read(name, *where)
        self.num_read[name] = tensor.numel()
        return tensor


def test_a_rank_reads_its_part_and_no_more(tmp_path: Path) -> None:
    files = open_model(save(small_hf_model("Llama"), tmp_path))
    source, shapes = Counted(files.source), expected_shapes(files.config)
    load_weights(source, files.config, dtype=torch.float32, device=CPU, shard=Shard(1, 2))
    for name, num_read in source.num_read.items():
        whole = torch.Size(shapes[name]).numel()
        is_cut = name.endswith("_proj.weight") or name == "lm_head.weight"
        assert num_read <= whole // 2 if is_cut else num_read == whole, name


def test_parts_of_a_gguf_file_are_those_of_its_whole_tensors(tmp_path: Path) -> None:
    files = open_model(write_gguf(small_hf_model("Llama"), tmp_path / "model.gguf"))
    for name, shape in files.source.shapes().items():
        whole = files.source.read(name)
        where = tuple(slice(size // 3, size - size // 4) for size in shape)
        assert torch.equal(files.source.read(name, *where), whole[where]), name
        assert torch.equal(files.source.read(name, where[0]), whole[where[0]]), name


def test_deterministic_sums_take_the_ranks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for all sizes. In any other order these three give 1, or lie in another chunk of NCCL's ring."""
    ranks = object.__new__(RanksOfGroup)
    ranks.shard, ranks._small = Shard(0, 3), NoSmallSums()
    of_ranks = [torch.tensor([[1e8]]), torch.tensor([[1.0]]), torch.tensor([[-1e8]])]
    monkeypatch.setattr(ranks, "_all", lambda x: [each.clone() for each in of_ranks])
    monkeypatch.setattr(ranks, "sum", lambda x: torch.tensor([[1.0]]))
    x = weight = torch.ones(1, 1)
    for deterministic, total in ((True, 0.0), (False, 1.0)):
        linears = linears_over(ranks, deterministic=deterministic)
        assert linears.summed_linear(x, weight, None).tolist() == [[total]]
        assert linears.summed_linear(x, weight, torch.tensor([2.0])).tolist() == [[total + 2]]


def test_a_token_is_multiplied_with_its_own_experts_alone(tmp_path: Path) -> None:
    config = open_model(save(family_model("qwen3_moe"), tmp_path)).config
    layer = config.layers[0]
    assert isinstance(layer.mlp, ExpertMlp)
    routing, of_an_expert = layer.mlp.routing, 3 * config.hidden_size * layer.mlp.intermediate_size
    one_less = replace(layer.mlp, routing=replace(routing, num_chosen=routing.num_chosen - 1))
    cut = replace(config, layers=tuple(replace(each, mlp=one_less) for each in config.layers))
    flops = [matrices_of(each, torch.float32, 1).flops for each in (config, cut)]
    assert flops[0] - flops[1] == pytest.approx(2 * of_an_expert * config.num_layers)
