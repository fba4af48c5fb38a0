"""K and V in eight bits: the runner serves exactly a model whose K and V were rounded to codes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadModel, BadSetting
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.machine.target import known_target
from rocm_attn.problem import KVEncoding, Scales
from rocm_attn.selection.kv_formats import AS_COMPUTED, KVFormat
from rocm_serve.engine import Engine
from rocm_serve.engine_runtime import model_over
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from tests.amd.coded import kept
from tests.amd.runner.dense_attention import DenseAttention, dense_logits_of, dense_model
from tests.amd.runner.families import FAMILIES, family_model
from tests.amd.runner.hf_models import changed_tensors, load, random_tokens, save
from tests.amd.runner.served_logits import served_logits
from tests.amd.tolerances import assert_layers_close

CODES = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
}
OPTIONS = EngineOptions(provider="torch", max_kv_len=64, num_pages=12)


def pages_of(engine: Engine) -> list[LayerPages]:
    return [engine.runtime.pool.layer(layer) for layer in range(3)]


def middles_of(code: torch.dtype) -> Tensor:
    """Returns the values that lie in the middle of two codes, float64."""
    values = torch.arange(256, dtype=torch.uint8).view(code).double()
    codes = torch.tensor(sorted({*values[values.isfinite()].tolist()}), dtype=torch.float64)
    return (codes[1:] + codes[:-1]) / 2


@dataclass(frozen=True)
class RoundedAttention(DenseAttention):
    """Keeps K and V in eight bits with one scale for each; a latent row has the one of K.

    margins: of each K and V, the least distance of a value from the middle of two codes, as a part of the largest value
    """

    code: torch.dtype = torch.float8_e4m3fn
    scale_values: tuple[float, float] = (1.0, 1.0)
    margins: list[float] = field(default_factory=list)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        is_latent = v.data_ptr() == k.data_ptr()
        k_scale_value, v_scale_value = self.scale_values[0], self.scale_values[0 if is_latent else 1]
        for x, scale_value in ((k, k_scale_value), (v, v_scale_value)):
            distances = x.double().reshape(-1, 1) / scale_value - middles_of(self.code)
            self.margins.append(float(distances.abs().min() / (x.abs().max() / scale_value)))
        super().store(layer, self._rounded(k, k_scale_value), self._rounded(v, v_scale_value))

    def _rounded(self, x: Tensor, scale_value: float) -> Tensor:
        most = torch.finfo(self.code).max
        return (x / scale_value).clamp(-most, most).to(self.code).to(x.dtype) * scale_value


def rounded_logits(loaded: LoadedModel, tokens: Tensor, code: torch.dtype, scale_values: tuple[float, float]) -> Tensor:
    model, dense = dense_model(loaded, len(tokens))
    attention = RoundedAttention(dense.problems, dense.head_weights, code=code, scale_values=scale_values)
    return dense_logits_of(model, attention, tokens)


def surely_rounded(loaded: LoadedModel, code: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns random tokens, and the logits of each.

    They are those of twenty draws whose keys and values lie farthest from the middle of two codes. There the order of a
    sum decides: float32 sums of a recurrent model are off by 3e-6 of the largest value.
    """
    draws: list[tuple[float, Tensor, Tensor]] = []
    for seed in range(20):
        torch.manual_seed(seed)
        tokens = random_tokens(30)
        model, dense = dense_model(loaded, len(tokens))
        attention = RoundedAttention(dense.problems, dense.head_weights, code=code)
        logits = dense_logits_of(model, attention, tokens)
        draws.append((min(attention.margins), tokens, logits))
    _, tokens, logits = max(draws, key=lambda draw: draw[0])
    return tokens, logits


# Rounding is a layer's: three of four families are the night's.
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.nightly] * (at % 8 > 0)) for at, family in enumerate(FAMILIES)]
)
def test_served_logits_are_those_of_rounded_keys_and_values(family: str, tmp_path: Path) -> None:
    kv_dtype = list(CODES)[list(FAMILIES).index(family) % 3]
    loaded = load(save(family_model(family), tmp_path))
    tokens, expected = surely_rounded(loaded, CODES[kv_dtype])
    kv = KVFormat.named(kv_dtype, "layer", known_target("cpu"))
    (rows,), _ = served_logits(loaded, [tokens], [17], chunk=7, page_size=16, graphs=False, kv=kv)
    exact, _ = served_logits(loaded, [tokens], [17], chunk=7, page_size=16, graphs=False, kv=AS_COMPUTED)
    for place, row in rows.items():
        assert_layers_close(row, expected[place])
    assert not torch.equal(rows[29], exact[0][29]), "eight bits show"


class RecordedAttention(DenseAttention):
    """Keeps latents as records in E4M3FN."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        problem = replace(self.problems[layer], kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.GROUP)
        rows = kept(k, problem, None)
        super().store(layer, rows, rows[..., : v.shape[2]])


def test_served_logits_are_those_of_latents_kept_as_records(tmp_path: Path) -> None:
    """DeepSeek-V3.2 with latents of one group."""
    torch.manual_seed(5)
    loaded = load(save(family_model("deepseek_v32", kv_lora_rank=128), tmp_path))
    tokens = random_tokens(30)
    kv = KVFormat.named("fp8", "group", known_target("cpu"))
    (rows,), _ = served_logits(loaded, [tokens], [17], chunk=7, page_size=16, graphs=False, kv=kv)
    model, dense = dense_model(loaded, len(tokens))
    expected = dense_logits_of(model, RecordedAttention(dense.problems, dense.head_weights), tokens)
    exact = dense_logits_of(*dense_model(loaded, len(tokens)), tokens)
    for place, row in rows.items():
        assert_layers_close(row, expected[place])
    assert not torch.equal(expected[29], exact[29]), "eight bits show"


@pytest.mark.parametrize(
    ("names", "scale_values"),
    [
        (("k_scale", "v_scale"), (0.5, 0.125)),
        (("k_proj.k_scale", "v_proj.v_scale"), (2.0, 0.25)),
        (("kv_scale",), (0.25, 0.25)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3fn", "fp8_e4m3fnuz"])
def test_scales_that_a_model_brings_are_used(
    kv_dtype: str, names: tuple[str, ...], scale_values: tuple[float, float], tmp_path: Path
) -> None:
    """Those were found for E4M3FN: in E4M3FNUZ, whose codes are worth half, they count twice."""
    loaded, tokens = load(with_scales(tmp_path, names, scale_values)), random_tokens(20)
    engine = Engine(loaded, replace(OPTIONS, kv_dtype=kv_dtype))
    formats = [pages.format for pages in pages_of(engine)]
    assert {form.scales for form in formats} == {Scales.LAYER}
    by = 2.0 if kv_dtype == "fp8_e4m3fnuz" else 1.0
    in_use = scale_values[0] * by, scale_values[1] * by
    for pages in pages_of(engine):
        assert pages.k_scale is not None
        assert pages.v_scale is not None
        assert (pages.k_scale.tolist(), pages.v_scale.tolist()) == ([in_use[0]], [in_use[1]])
    prompt = tuple(tokens.tolist())
    (completion,) = engine.generate([Request(prompt, 5, ignore_eos=True)])
    whole = torch.tensor(prompt + completion.token_ids)
    best = rounded_logits(loaded, whole, CODES[kv_dtype], in_use).argmax(-1)
    assert completion.token_ids == tuple(best[len(prompt) - 1 : -1].tolist())


def test_scales_belong_to_the_layers_with_attention(tmp_path: Path) -> None:
    """One of four layers has K and V here, and all layers with K and V have scales."""
    loaded = load(with_scales(tmp_path, ("k_scale", "v_scale"), (0.5, 0.125), "qwen3_next", layers=(1,)))
    pages = Engine(loaded, replace(OPTIONS, kv_dtype="fp8_e4m3fn")).runtime.pool.layer(0)
    assert pages.format.scales is Scales.LAYER
    assert pages.k_scale is not None
    assert pages.v_scale is not None
    assert (pages.k_scale.tolist(), pages.v_scale.tolist()) == ([0.5], [0.125])


def with_scales(
    directory: Path,
    names: tuple[str, ...],
    scale_values: tuple[float, ...],
    family: str = "qwen3",
    layers: Sequence[int] = range(3),
) -> Path:
    """Writes a small model whose file has scales of these layers."""
    with changed_tensors(save(family_model(family), directory)) as tensors:
        for layer in layers:
            for name, scale_value in zip(names, scale_values, strict=False):
                tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale_value)
    return directory


@pytest.mark.parametrize(
    ("names", "scale_values", "sentence"),
    [
        (("k_scale",), (1.0,), "has one of .*k_scale and .*v_scale; it must have both or none"),
        (("k_scale", "v_scale"), (1.0, 0.0), "v_scale is 0.0; it must be one positive number"),
        (("k_scale", "v_scale"), (float("nan"), 1.0), "k_scale is nan"),
    ],
)
def test_scales_that_cannot_be_are_refused(
    names: tuple[str, ...], scale_values: tuple[float, ...], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(BadModel, match=sentence):
        load(with_scales(tmp_path, names, scale_values))


def test_a_pool_takes_a_quarter_of_the_memory_and_as_many_bytes_hold_more_pages(tmp_path: Path) -> None:
    loaded = load(save(family_model("qwen3"), tmp_path))
    wide, narrow = (
        Engine(loaded, replace(OPTIONS, kv_dtype=kv_dtype, kv_scales=kv_scales))
        for kv_dtype, kv_scales in (("auto", "auto"), ("fp8", "layer"))
    )
    assert narrow.runtime.pool.num_bytes * 4 == wide.runtime.pool.num_bytes
    by_bytes = replace(OPTIONS, num_pages=None, kv_bytes=wide.runtime.pool.num_bytes, max_batch_size=64)
    more = Engine(loaded, replace(by_bytes, kv_dtype="fp8", kv_scales="layer"))
    assert more.runtime.pool.num_pages == 4 * OPTIONS.num_pages  # type: ignore[operator]


def test_scales_of_tokens_are_the_default_where_a_model_brings_none(tmp_path: Path) -> None:
    loaded = load(save(family_model("qwen3"), tmp_path))
    engine = Engine(loaded, replace(OPTIONS, kv_dtype="fp8"))
    assert {pages.format.scales for pages in pages_of(engine)} == {Scales.TOKEN}
    model_over(engine.runtime, loaded, OPTIONS)


@pytest.mark.parametrize(
    ("arch", "encoding"),
    [
        ("gfx942", KVEncoding.E4M3FNUZ),
        ("gfx950", KVEncoding.E4M3FN),
        ("sm_90", KVEncoding.E4M3FN),
        ("sm_80", KVEncoding.E4M3FN),
        ("cpu", KVEncoding.E4M3FN),
    ],
)
def test_fp8_is_what_the_matrix_units_read(arch: str, encoding: KVEncoding) -> None:
    target = known_target(arch)
    assert KVFormat.named("fp8", "auto", target) == KVFormat(encoding, Scales.TOKEN)
    assert KVFormat.named("fp8", "auto", target, has_scales=True) == KVFormat(encoding, Scales.LAYER)
    assert KVFormat.named("fp8_e5m2", "auto", target, has_scales=True) == KVFormat(KVEncoding.E5M2, Scales.TOKEN)
    assert KVFormat.named("auto", "auto", target, has_scales=True) == AS_COMPUTED


@pytest.mark.parametrize(
    ("kv_dtype", "kv_scales", "sentence"),
    [
        ("auto", "token", "kv_scales is token and kv_dtype auto; only eight-bit K and V have scales"),
        ("fp4", "auto", "kv_dtype 'fp4' is not known; choose one of auto, fp8, fp8_e4m3fn"),
        ("fp8", "page", "kv_scales 'page' is not known; choose one of auto, layer, head, token"),
    ],
)
def test_formats_that_are_none_are_refused(kv_dtype: str, kv_scales: str, sentence: str) -> None:
    with pytest.raises(BadSetting, match=sentence):
        KVFormat.named(kv_dtype, kv_scales, known_target("cpu"))
