"""An engine's release, for a model that `rocm-attn explain` describes: its known faults, and its pages."""

import argparse
import contextlib
import dataclasses

from rocm_attn.cli.arguments import config_at, described_model
from rocm_attn.errors import BadSetting, Unsupported
from rocm_attn.external import Bounds, ExternalOptions
from rocm_attn.integrations.plugins import PLUGINS
from rocm_attn.machine.known_bad import COMPONENTS, ENGINES, Facts, KnownBad, matching
from rocm_attn.machine.releases import UNKNOWN, Release
from rocm_attn.models.families import architecture_of
from rocm_attn.models.fields import read_json
from rocm_attn.problem import UNLIMITED_WINDOW, AllKeys
from rocm_attn.providers.contract import PoolSize


def named_engine(text: str) -> tuple[str, Release]:
    """The engine and the release of --engine; "vllm@0.33" is 0.33.0. Raises BadSetting."""
    engine, _, version = text.partition("@")
    release = Release.of(version)
    if engine not in ENGINES or release == UNKNOWN:
        raise BadSetting(
            f"--engine is {text!r}; give an engine and its release, as in vllm@0.33; engines are {', '.join(ENGINES)}"
        )
    if len(release.numbers) == 3:
        release = Release((*release.numbers[:2], 0, release.numbers[2]))
    return engine, release


def pool_of(options: argparse.Namespace, pool: PoolSize, *, is_latent: bool) -> PoolSize:
    """The pool of options.engine if it has a plug-in, whose options say what its pages require; else the given one.

    is_latent: whether pages hold latent rows, which lie one after the other in every engine
    Raises BadSetting.
    """
    engine = None if options.engine is None else named_engine(options.engine)[0]
    for plugin in PLUGINS:
        if plugin.name == engine:
            packs_rows = plugin.packs_rows and not is_latent
            external = ExternalOptions(page_strides=packs_rows, even_slots=packs_rows)
            return external.pool_size(Bounds(num_seqs=1, kv_len=1, num_pages=pool.num_pages))
    return pool


def faults(options: argparse.Namespace) -> tuple[tuple[KnownBad, tuple[str, ...]], ...]:
    """The rows of the table that apply to options.engine with options.config on options.arch, and what they need.

    None without an engine. The attention of the model need not be one that this runtime serves. Raises BadModel,
    BadSetting.
    """
    if options.engine is None:
        return ()
    given = {name: getattr(options, f"{name}_release", None) for name in COMPONENTS}
    releases = {name: Release.of(version) for name, version in given.items() if version is not None}
    path = config_at(options.config)
    facts = Facts(
        releases=dict([*releases.items(), named_engine(options.engine)]),
        archs=frozenset({options.arch}),
        model=architecture_of(read_json(path)) if path.suffix == ".json" else None,
    )
    features = {"fp8_kv": options.kv_dtype != "auto", "ranks": options.tp > 1}
    with contextlib.suppress(Unsupported):
        geometry = described_model(options.config).geometry.on_one_of(options.tp)
        layers = geometry.layers
        features["state_layers"] = bool(geometry.recurrent)
        features["latent"] = any(layer.latent_dim for layer in layers)
        features["sparse"] = not all(isinstance(layer.indexer, AllKeys) for layer in layers)
        features["window"] = any(layer.window_left != UNLIMITED_WINDOW for layer in layers)
        # A latent layer's rows are long, and its heads are not.
        features["wide_heads"] = any(layer.head_dim > 256 and not layer.latent_dim for layer in layers)
        facts = dataclasses.replace(facts, heads=frozenset(layer.num_q_heads for layer in layers))
    return matching(dataclasses.replace(facts, features=features))
