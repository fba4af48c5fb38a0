"""A Llama of random weights, small enough to be served hundreds of times in a test."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import tokenizers
import torch
from torch import Tensor

from rocm_attn.models.config import (
    AttentionConfig,
    LayerConfig,
    MixerConfig,
    ModelConfig,
    RecurrentConfig,
    RecurrentProjections,
)
from rocm_attn.models.gates import ReluSquared, SwiGLU
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.hf_recurrent import GATED_DELTA
from rocm_attn.models.mlp_config import DenseMlp, NoMlp
from rocm_attn.models.recurrent import RecurrentLayer
from rocm_attn.models.rope import Rope
from rocm_attn.models.tensors import Shape
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.weights import expected_shapes, load_weights
from rocm_serve.ranks import ONE_RANK, Ranks
from rocm_serve.text.chat_template import ChatTemplate
from rocm_serve.text.tokenizer import Tokenizer

_ATTENTION = AttentionLayer(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5)
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=(LayerConfig((AttentionConfig(_ATTENTION, Rope(theta=10000.0, head_dim=8)),), DenseMlp(40, SwiGLU())),) * 2,
    hidden_size=24,
    vocab_size=64,
    context_len=96,
    rms_norm_eps=1e-5,
    tied_embeddings=False,
    eos_token_ids=(),
)
RECURRENCE = RecurrentConfig(
    RecurrentLayer(GATED_DELTA, 1, 2, key_dim=8, value_dim=8, conv_width=4),
    RecurrentProjections(),
)
RECURRENT_LAYER = LayerConfig((RECURRENCE,), DenseMlp(40, SwiGLU()))
# The same model with a recurrent layer first, so that K and V follow from states too.
RECURRENT = replace(CONFIG, layers=(RECURRENT_LAYER, *CONFIG.layers))


def in_a_layer_before(config: ModelConfig, mixer: RecurrentConfig) -> ModelConfig:
    """The model after a layer with the recurrence, as in most models."""
    return replace(config, layers=(LayerConfig((mixer,), config.layers[0].mlp), *config.layers))


def next_to_attention(config: ModelConfig, mixer: RecurrentConfig) -> ModelConfig:
    """The model, whose first layer has the recurrence too, as in Falcon-H1."""
    first, *others = config.layers
    return replace(config, layers=(LayerConfig((mixer, *first.mixers), first.mlp), *others))


def each_part_alone(config: ModelConfig, mixer: RecurrentConfig) -> ModelConfig:
    """The recurrence, an MLP, the model's attention, and an MLP, each in a layer of its own, as in Nemotron-H."""
    mlp = LayerConfig((), DenseMlp(40, ReluSquared()))
    attending = (LayerConfig(layer.mixers, NoMlp()) for layer in config.layers)
    return replace(config, layers=(LayerConfig((mixer,), NoMlp()), mlp, *attending, mlp))


Layout = Callable[[ModelConfig, RecurrentConfig], ModelConfig]
LAYOUTS: tuple[Layout, ...] = (in_a_layer_before, next_to_attention, each_part_alone)

WORDS = [f"w{number}" for number in range(CONFIG.vocab_size)]
# The token that with_nan_token() changes in a model.
NAN_TOKEN = 7


def word_tokenizer() -> Tokenizer:
    """Token 5 is the word w5, and so on; an unknown word is w0. A conversation begins with w63."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    template = ChatTemplate("{{ 'w63 ' + messages[0]['content'] }}")
    return Tokenizer(backend=backend, bos_token_id=None, chat_template=template)


def with_windows(config: ModelConfig, *window_left: int) -> ModelConfig:
    """The model with these windows, one per layer with attention."""
    assert len(window_left) == len(config.attending)
    left = iter(window_left)

    def windowed(mixer: MixerConfig) -> MixerConfig:
        if isinstance(mixer, RecurrentConfig):
            return mixer
        return replace(mixer, attention=replace(mixer.attention, window_left=next(left)))

    layers = (replace(layer, mixers=tuple(map(windowed, layer.mixers))) for layer in config.layers)
    return replace(config, layers=tuple(layers))


def with_attention(attention: AttentionLayer) -> LayerConfig:
    """The first layer of the model with other heads."""
    return replace(CONFIG.layers[0], mixers=(replace(CONFIG.attending[0], attention=attention),))


class RandomTensors:
    """A TensorSource with weights of a size that makes the best logit stand out."""

    name = "random tensors"

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._shapes = expected_shapes(config)
        self._random = torch.Generator().manual_seed(seed)

    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def read(self, name: str, *where: slice) -> Tensor:
        shape = self._shapes[name]
        if "norm" in name:
            return torch.ones(shape)[where]
        return (torch.randn(shape, generator=self._random) * 0.4)[where]


def tiny_model(
    *,
    seed: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    context_len: int = CONFIG.context_len,
    tokenizer: Tokenizer | None = None,
    base: ModelConfig = CONFIG,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    ranks: Ranks = ONE_RANK,
) -> LoadedModel:
    config = replace(base, eos_token_ids=eos_token_ids, context_len=context_len)
    place = torch.device("cpu") if device is None else device
    weights = load_weights(RandomTensors(config, seed), config, dtype=dtype, device=place, shard=ranks.shard)
    return LoadedModel(config.on_one_of(ranks.shard.num_ranks), weights, tokenizer, ranks)


def load_tiny(path: str, *, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_RANK) -> LoadedModel:
    """Like rocm_serve.load_model, but returns a tiny model at once."""
    return tiny_model(context_len=512, dtype=dtype, device=device, tokenizer=word_tokenizer(), ranks=ranks)


def with_nan_token(loaded: LoadedModel) -> LoadedModel:
    """The same model, in which NAN_TOKEN now has K, V and logits that are NaN, and is never the likeliest token."""
    loaded.weights.embedding[NAN_TOKEN] = float("nan")
    loaded.weights.head[NAN_TOKEN] = 0.0
    return loaded
