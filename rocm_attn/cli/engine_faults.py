"""The faults that are known of an engine's release, for a model that `rocm-attn explain` describes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from pathlib import Path

from rocm_attn.cli.arguments import described_model
from rocm_attn.errors import BadSetting, Unsupported
from rocm_attn.machine.known_bad import COMPONENTS, ENGINES, Facts, Match, matching
from rocm_attn.machine.releases import UNKNOWN, Release
from rocm_attn.models.families import architecture_of
from rocm_attn.models.fields import read_json
from rocm_attn.problem import UNLIMITED_WINDOW, AllKeys

# Heads of more elements need other kernels.
_WIDE = 256


def named_engine(text: str) -> tuple[str, Release]:
    """The engine and the release of --engine; "vllm@0.33" is 0.33.0. Raises BadSetting."""
    engine, at, version = text.partition("@")
    release = Release.of(version)
    if engine not in ENGINES or not at or release == UNKNOWN:
        raise BadSetting(f"--engine is {text!r}; give one of {', '.join(ENGINES)}, @ and a release, as in vllm@0.33")
    if len(release.numbers) == 3:
        release = Release((*release.numbers[:2], 0, release.numbers[2]))
    return engine, release


def faults(options: argparse.Namespace) -> tuple[Match, ...]:
    """The rows of the table that apply to options.engine with options.config on options.arch; none without an engine.

    The attention of the model need not be one that this runtime serves. Raises BadModel, BadSetting.
    """
    if options.engine is None:
        return ()
    engine, release = named_engine(options.engine)
    given = {name: getattr(options, f"{name}_release", None) for name in COMPONENTS}
    others = {name: Release.of(version) for name, version in given.items() if version is not None}
    facts = Facts(
        releases={**others, engine: release},
        archs=frozenset({options.arch}),
        model=_model(Path(options.config)),
        features={"fp8_kv": options.kv_dtype != "auto", "ranks": options.tp > 1},
    )
    with contextlib.suppress(Unsupported):
        facts = _with_layers(facts, options)
    return matching(facts)


def _model(path: Path) -> str | None:
    place = path / "config.json" if path.is_dir() else path
    return architecture_of(read_json(place)) if place.suffix == ".json" and place.is_file() else None


def _with_layers(facts: Facts, options: argparse.Namespace) -> Facts:
    layers = described_model(options.config).geometry.on_one_of(options.tp).layers
    found = {
        "latent": any(layer.latent_dim for layer in layers),
        "sparse": not all(isinstance(layer.indexer, AllKeys) for layer in layers),
        "window": any(layer.window_left != UNLIMITED_WINDOW for layer in layers),
        # A latent layer's rows are long, and its heads are not.
        "wide_heads": any(layer.head_dim > _WIDE and not layer.latent_dim for layer in layers),
    }
    heads = frozenset(layer.num_q_heads for layer in layers)
    return dataclasses.replace(facts, features={**facts.features, **found}, heads=heads)
