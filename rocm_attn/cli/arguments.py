"""Conversions of arguments that several commands share."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rocm_attn.capture.step_times import MOST_CHUNK
from rocm_attn.errors import BadModel, BadSetting
from rocm_attn.machine.aiter_releases import too_old
from rocm_attn.machine.devices import device_of, require_there
from rocm_attn.machine.releases import UNKNOWN, Release, Releases
from rocm_attn.machine.target import Target, target_elsewhere
from rocm_attn.models.config import ModelConfig
from rocm_attn.models.families import DECODERS, architecture_of, attention_geometry, text_fields
from rocm_attn.models.fields import read_json
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.hf_config import config_from_json, context_len
from rocm_attn.models.hub import config_of_id, is_hub_id
from rocm_attn.paging.checkpoints import StateMemory, spacing_of
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.paging.state_pool import RecurrentLayers
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.select import Selection, select
from rocm_attn.selection.kv_formats import KVFormat
from rocm_attn.selection.pages import POOLS, PageChoice, choose_pages, open_page_sizes, open_pools
from rocm_attn.step.options import RuntimeOptions


def device_named(name: str | None) -> torch.device:
    """The torch device of --device; if not given: a GPU if there is one, else the CPU. Raises BadSetting."""
    device = device_of(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    require_there(device)
    return device


def page_choice(
    options: argparse.Namespace, problems: Sequence[Problem], choose: Callable[[Problem], Selection]
) -> PageChoice:
    """The pages of --page-size and --pool; see choose_pages. Raises Unsupported."""
    return choose_pages(problems, choose, open_page_sizes(options.page_size), open_pools(options.pool))


@dataclass(frozen=True, slots=True)
class PlannedRuntime:
    """A model's runtime on one rank, as the options that capture-plan and prewarm share describe it.

    whole:    the model on all ranks
    problems: on this one, for sequences of settings.max_kv_len
    states:   of recurrent layers, which may go back by the draft tokens of a step
    """

    whole: AttentionGeometry
    pages: PageChoice
    problems: tuple[Problem, ...]
    settings: RuntimeOptions
    states: StateMemory


def planned_runtime(
    options: argparse.Namespace, target: Target, unavailable: Mapping[str, str], **more: Any
) -> PlannedRuntime:
    """Plans the runtime of options.config; with pages for all sequences if their number is not given.

    unavailable: kernel -> why the machine lacks it; more: further RuntimeOptions
    Raises BadModel, BadSetting, BadProblem, Unsupported.
    """
    model = described_model(options.config)
    max_kv_len = model.max_kv_len(options.max_kv_len)
    geometry = model.geometry.on_one_of(options.tp).without_idle_windows(max_kv_len)
    kv = KVFormat.named(options.kv_dtype, options.kv_scales, target)
    over = geometry.problems(dtype=getattr(torch, options.dtype), page_size=geometry.least_page_size, kv=kv)
    given = {"provider": options.provider, "deterministic": options.deterministic}
    pages = page_choice(options, over, partial(select, target=target, unavailable=unavailable, **given))
    problems = pages.problems(over)
    if any(drafts.branches > 1 for drafts in options.drafts):
        problems = tuple(replace(problem, custom_mask=True) for problem in problems)
    enough = 1 + options.max_batch_size * num_pages(max_kv_len, pages.page_size)
    settings = RuntimeOptions(
        num_pages=enough if options.num_pages is None else options.num_pages,
        max_num_seqs=options.max_batch_size,
        max_kv_len=max_kv_len,
        capture_sizes=options.capture_sizes,
        capture_tokens=options.capture_tokens,
        shared_prefixes=options.shared_prefixes,
        drafts=options.drafts,
        **given,
        **more,
    )
    first, kept = problems[0], max(1, settings.verify_tokens)
    spacing = spacing_of(first.page_size, MOST_CHUNK)
    recurrent = RecurrentLayers(geometry.recurrences(first.dtype), kept=kept, spacing=spacing)
    states = StateMemory(recurrent, settings.num_rows + 1, page_bytes(problems), first.page_size)
    return PlannedRuntime(model.geometry, pages, problems, settings, states)


def pages_as_json(pages: PageChoice) -> dict[str, object]:
    """The page size and the name of the layout."""
    (pool,) = (name for name, pool in POOLS.items() if pool is pages.pool)
    return {"page_size": pages.page_size, "pool": pool}


_ENCODINGS = {"as-q": KVEncoding.LIKE_Q, **{kind.name.lower(): kind for kind in KVEncoding if kind.name != "LIKE_Q"}}
_SCALES = {kind.name.lower(): kind for kind in Scales if kind is not Scales.NONE}


def kv_encodings(names: Sequence[str]) -> Iterator[tuple[KVEncoding, Scales]]:
    """Yields the encodings and scales of --kv-encodings. Raises BadSetting for those that do not exist."""
    if list(names) == ["all"]:
        names = ["as-q", *(f"{code}/{scales}" for code in _ENCODINGS if code != "as-q" for scales in _SCALES)]
    for name in names:
        code, _, scales = name.partition("/")
        if code not in _ENCODINGS or (scales and scales not in _SCALES) or (scales and code == "as-q"):
            codes, kinds = ", ".join(_ENCODINGS), ", ".join(_SCALES)
            raise BadSetting(f"encoding {name!r} is not known; give all, or one of {codes}, with /{kinds} after it")
        encoding = _ENCODINGS[code]
        yield encoding, Scales.NONE if encoding is KVEncoding.LIKE_Q else _SCALES[scales or "layer"]


def config_at(place: str, besides: str = "") -> Path:
    """The file that describes the model at `place`; see described_model. Raises BadModel if there is none."""
    if is_hub_id(place):
        return config_of_id(place)
    path = Path(place)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise BadModel(
            f"there is no file {path}; give a model's config.json, the directory that holds it, a .gguf file, or an "
            f"id of Hugging Face's hub{besides}"
        )
    return path


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model's attention as its files describe it, without its weights.

    geometry:   a window no shorter than the model's context counts as none
    max_kv_len: from --max-kv-len, None if it is not given, to the tokens of a sequence. Raises BadSetting
    """

    geometry: AttentionGeometry
    max_kv_len: Callable[[int | None], int]


def described_model(place: str, besides: str = "") -> DescribedModel:
    """The model at `place`: a config.json, the directory that holds it, a .gguf file, or an id of the hub.

    besides: words that a command takes in place of a model, for the refusal: ", or ..."

    Raises BadModel if it is missing or damaged, Unsupported for attention of another kind.
    """
    path = config_at(place, besides)
    if path.suffix == ".gguf":
        of_file = runner_config(path)
        geometry, longest = of_file.attention, of_file.context_len
    else:
        config = read_json(path)
        geometry = attention_geometry(config)
        longest = _context_len(config, geometry)
    if longest:
        geometry = geometry.without_idle_windows(longest)
    return DescribedModel(geometry, partial(_max_kv_len, longest))


def runner_config(path: Path) -> ModelConfig:
    """The model as the runner of rocm-serve runs it. Raises BadModel or Unsupported if it does not."""
    if path.suffix == ".gguf":
        # Imported here, because the gguf package belongs to an extra.
        from rocm_attn.models.gguf_config import config_from_gguf
        from rocm_attn.models.gguf_file import GGUFFile

        return config_from_gguf(GGUFFile(path))
    return config_from_json(read_json(path))


_CONTEXT = "max_position_embeddings"


def _context_len(config: Mapping[str, object], geometry: AttentionGeometry) -> int:
    """Tokens of a model's context, by its config.json; 0 if that does not say it. Raises BadModel."""
    fields, decoder = text_fields(config), DECODERS.get(architecture_of(config))
    if not fields.has(_CONTEXT):
        return 0
    with suppress(BadModel):  # another engine may serve a rotary embedding that ours does not
        return context_len(fields, decoder.ropes(fields, geometry) if decoder else ())
    return context_len(fields, ())


def _max_kv_len(longest: int, given: int | None) -> int:
    if not longest and given is None:
        raise BadSetting(f"config.json has no {_CONTEXT}; give --max-kv-len")
    if given is not None and 0 < longest < given:
        raise BadSetting(f"max_kv_len is {given}; it must be at most the model's context, {longest}")
    return longest if given is None else given


def requested_target(options: argparse.Namespace) -> Target:
    """The target of --arch, with the releases that are given. Raises BadSetting."""
    target = target_elsewhere(options.arch)
    requested = {"aiter": options.aiter_release, "rocm": options.rocm_release, "triton": options.triton_release}
    given = {name: Release.of(text) for name, text in requested.items() if text is not None}
    for name, release in given.items():
        if release == UNKNOWN:
            raise BadSetting(
                f"--{name}-release is {requested[name]!r}; give a release number, for instance 0.1.20 or 7.2"
            )
        if not target.is_amd and name != "triton":
            raise BadSetting(f"--{name}-release needs an AMD arch, and --arch is {target.arch}")
    if sentence := too_old(options.aiter_release or ""):
        raise BadSetting(f"{sentence}; give --aiter-release a later one")
    of = target.releases
    releases = Releases(
        given.get("rocm", of.rocm),
        given.get("aiter", of.aiter),
        given.get("triton", of.triton),
        marks=frozenset() if "aiter" in given else of.marks,  # they are those of the image's AITER
    )
    return replace(target, releases=releases)
