"""A tiny model whose texts repeat in circles, with an occasional slip: most drafts are right, but not all."""

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.weights import load_weights
from rocm_serve.ranks import ONE_RANK, Ranks
from rocm_serve.request import Request
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation.device_steps import DeviceSpeculation
from tests.amd.runner.serving import BASE
from tests.amd.runner.tiny_model import CONFIG, RandomTensors, with_windows

CIRCLE = 8  # tokens
OPTIONS = replace(BASE, max_batch_size=4, chunk=64, max_kv_len=300, speculative="ngram", draft_tokens=3, steps_ahead=1)
# The part of its layers' outputs that is kept: at 0 the next token depends only on the last one.
_LEFT = 0.02


class RoundTexts(RandomTensors):
    """Weights of such a model."""

    circle = CIRCLE

    def read(self, name: str, *where: slice) -> Tensor:
        """Does the same as `TensorSource.read`."""
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return super().read(name, *where) * _LEFT
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            random = torch.Generator().manual_seed(5)
            embedding = torch.randn(self._shapes["model.embed_tokens.weight"], generator=random) * 0.4
            if name == "lm_head.weight":
                circles = embedding.view(-1, self.circle, embedding.shape[1])
                embedding = circles.roll(1, 1).reshape(embedding.shape)
            return embedding[where]
        return super().read(name, *where)


def round_model(
    device: torch.device | None = None,
    windows: tuple[int, ...] = (),
    circle: int = CIRCLE,
    ranks: Ranks = ONE_RANK,
) -> LoadedModel:
    """The model, with a longer context than the tiny one.

    windows: window_left of its layers, if they have any
    circle:  tokens, a power of 2
    ranks:   the ranks that share it
    """
    config = replace(with_windows(CONFIG, *windows) if windows else CONFIG, context_len=512)
    place = torch.device("cpu") if device is None else device
    source = RoundTexts(config, 1)
    source.circle = circle
    weights = load_weights(source, config, dtype=torch.float32, device=place, shard=ranks.shard)
    return LoadedModel(config.on_one_of(ranks.shard.num_ranks), weights, None, ranks)


def repeating_requests() -> list[Request]:
    """Greedy requests, and some that draw."""
    draw, made = random.Random(3), list[Request]()
    for seed in range(4):
        prompt = tuple(draw.randrange(CONFIG.vocab_size) for _ in range(draw.randrange(2, 20)))
        sampling = Sampling(0.7, 0.95, seed=seed, top_k=6) if seed % 2 else Sampling()
        made.append(Request(prompt, 40 + 9 * seed, sampling))
    return made


def launched(engine: Engine) -> list[int]:
    """Returns a list that gets a 1 for each round that the host has not planned."""
    rounds, noted = engine._speculative_steps, list[int]()
    assert isinstance(rounds, DeviceSpeculation)
    launch = rounds.launch

    def and_count() -> Any:
        noted.append(1)
        return launch()

    rounds.launch = and_count  # type: ignore[method-assign]
    return noted
