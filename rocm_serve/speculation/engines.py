"""Builds the drafter that an engine's options request."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.errors import BadModel, BadSetting
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.step import Part
from rocm_serve.engine_runtime import NOTHING_BESIDE, Beside, StepForms, captures_all_steps, model_over, runtime_with
from rocm_serve.measured_memory import GraphMemory
from rocm_serve.models.loading import LoadedModel, load_model
from rocm_serve.models.model import Model
from rocm_serve.models.places import find_model
from rocm_serve.options import EngineOptions, without_drafts
from rocm_serve.speculation.draft_model import ModelDrafter
from rocm_serve.speculation.draft_runners import DraftingModel, DraftRunners, drafts_of, num_levels
from rocm_serve.speculation.drawn import NothingDrawn, Rejection
from rocm_serve.speculation.eagle import EagleDrafter
from rocm_serve.speculation.eagle3 import is_eagle3, load_head3, seeded_head3
from rocm_serve.speculation.eagle_head import EagleWeights, load_head
from rocm_serve.speculation.last_rows import HandingOver
from rocm_serve.speculation.methods import DRAFT_MODEL, EAGLE, NGRAM, OFF, SEEDED, SEEDED3, require_ranks
from rocm_serve.speculation.ngrams import NgramDrafter
from rocm_serve.speculation.row_drafter import RowDrafter
from rocm_serve.speculation.speculation import NOTHING_DRAWN, Drafter


def served(model: Model, drafting: Drafting, options: EngineOptions, runtime: AttentionRuntime) -> Model | HandingOver:
    """The model that steps run. If a head drafts, it hands its rows over."""
    if not isinstance(drafting, EagleWeights):
        return model
    most = max(options.chunk + options.max_batch_size, runtime.padding.seqs.largest * options.rows_of_each)
    return HandingOver(model, most, drafting.layers)


@dataclass(frozen=True, slots=True, eq=False)
class NoWeights:
    """Stands for no draft weights: nothing drafts, or the text itself is looked up."""


# The weights of a drafter, as they were read.
Drafting = NoWeights | LoadedModel | EagleWeights


def read_drafting(loaded: LoadedModel, options: EngineOptions) -> Drafting:
    """Reads the weights of the drafter, before the model's pool is sized. Raises BadModel, BadSetting."""
    require_ranks(options.speculative, loaded.ranks.shard.num_ranks)
    if options.speculative in (OFF, NGRAM):
        return NoWeights()
    if options.speculative.startswith(EAGLE):
        return _read_head(options.speculative.removeprefix(EAGLE), loaded)
    path = options.speculative.removeprefix(DRAFT_MODEL)
    small = load_model(path, dtype=loaded.weights.dtype, device=loaded.weights.device)
    if small.config.attention.recurrent:
        raise BadSetting(
            f"speculative is {options.speculative}, a model with recurrent layers, and drafts are made in rounds on "
            "the device, which have no states; use a draft model without recurrent layers, or ngram"
        )
    return small


def _read_head(path: str, loaded: LoadedModel) -> EagleWeights:
    """The head in a directory, which names its kind, or a seeded one."""
    if path == SEEDED3:
        return seeded_head3(loaded)
    if path == SEEDED:
        return load_head(path, loaded)
    path = str(find_model(path))
    return load_head3(path, loaded) if is_eagle3(path) else load_head(path, loaded)


def beside(drafting: Drafting, loaded: LoadedModel, options: EngineOptions) -> Beside:
    """The model or head that drafts, with the memory that it takes in addition to the model's."""
    if isinstance(drafting, NoWeights):
        return NOTHING_BESIDE
    attention = (drafting if isinstance(drafting, LoadedModel) else drafting.model).config.attention

    def make_graphs(runtime: AttentionRuntime) -> GraphMemory:
        model = served(model_over(runtime, loaded, options), drafting, options, runtime)
        drafter = drafter_of(drafting, loaded, options, runtime, model)
        assert isinstance(drafter, ModelDrafter | EagleDrafter), "it has weights"
        return drafter.runners.make_largest_graphs()

    return Beside(attention.layers[: attention.num_storing], make_graphs)


def drafter_of(
    drafting: Drafting,
    loaded: LoadedModel,
    options: EngineOptions,
    runtime: AttentionRuntime,
    model: Model | HandingOver,
) -> Drafter:
    """The drafter of an engine's model. model: see served()

    Raises BadModel, NeverFits for a small model or a head that cannot draft.
    """
    if isinstance(drafting, LoadedModel):
        return model_drafter(drafting, loaded, options, runtime)
    if isinstance(drafting, EagleWeights):
        assert isinstance(model, HandingOver)
        return eagle_drafter(drafting, model, options, runtime)
    return NgramDrafter(options.topk) if options.speculative == NGRAM else Drafter()


def rejection_of(drafter: Drafter, options: EngineOptions) -> Rejection | NothingDrawn:
    """Accepts drawn drafts, if there are any."""
    if not options.sampled_drafts:
        return NOTHING_DRAWN
    assert isinstance(drafter, RowDrafter), "EngineOptions refuses others"
    return Rejection(drafter.probabilities, options.topk)


def model_drafter(
    small: LoadedModel, large: LoadedModel, options: EngineOptions, runtime: AttentionRuntime
) -> ModelDrafter:
    """A small model that drafts for a large one. options, runtime: of the large model's engine

    Raises BadModel for a model with other tokens, NeverFits for an impossible pool.
    """
    if small.config.vocab_size != large.config.vocab_size:
        raise BadModel(
            f"the draft model has {small.config.vocab_size} tokens and the model {large.config.vocab_size}; use "
            "one with the same tokens"
        )
    few = 1 + num_levels(options)
    drafting, its_own = _runtime_of(small, options, runtime, few)
    model = SmallModel(model_over(drafting, small, its_own))
    runners = DraftRunners(drafting, model, options, vocabulary=small.config.vocab_size)
    return ModelDrafter(runners, drafting.table, chunk=options.chunk, few=few)


def eagle_drafter(
    weights: EagleWeights, large: HandingOver, options: EngineOptions, runtime: AttentionRuntime
) -> EagleDrafter:
    """A head that drafts for a model. options, runtime: of the model's engine. Raises NeverFits."""
    few = 1 + num_levels(options)
    drafting, _ = _runtime_of(weights.model, options, runtime, few)
    most = max(large.features.shape[0], drafting.padding.seqs.largest * few)
    head = weights.over(large.model, drafting, most)
    runners = DraftRunners(drafting, head, options, vocabulary=large.model.config.vocab_size)
    return EagleDrafter(runners, drafting.table, handed=large.features, features=head.features, few=few)


def _runtime_of(
    small: LoadedModel, options: EngineOptions, runtime: AttentionRuntime, few: int
) -> tuple[AttentionRuntime, EngineOptions]:
    """The runtime of an engine's drafter, and its options. few: new tokens of a sequence in captured steps

    Its pool holds as many tokens as the engine's, and drafts of all its sequences. It has one pool for all layers: K
    and V that have left a window may be needed again, after drafts that were rejected.
    """
    page_size, drafts = runtime.pool.page_size, drafts_of(options)
    max_kv_len = min(runtime.max_kv_len + drafts.tokens, small.config.context_len)
    most_pages = runtime.pool.num_pages + options.max_batch_size * (1 + num_pages(drafts.tokens, page_size))
    its_own = replace(
        without_drafts(options),
        page_size=page_size,
        pool="auto",
        kv_dtype="auto",
        kv_scales="auto",
        max_kv_len=max_kv_len,
        num_pages=min(1 + options.max_batch_size * num_pages(max_kv_len, page_size), most_pages),
        kv_bytes=None,
        swa_pages=0,
        state_checkpoints=None,
    )
    forms = StepForms(
        verify_tokens=few if captures_all_steps(options, runtime.device) else 0,
        masks=options.topk > 1,
        drafts=tuple(each for each in (drafts,) if isinstance(each, Drafts)),
    )
    drafting, _ = runtime_with(small, its_own, forms)
    return drafting, its_own


class SmallModel(DraftingModel):
    """A whole model that drafts: it hands on nothing but K and V from token to token."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.nothing_carried = torch.empty(0, 0, dtype=model.weights.dtype, device=model.weights.device)

    def taken_in(self, step: Part) -> tuple[Tensor, Tensor]:
        logits = self._model.forward(step)
        return logits, self.nothing_carried.new_empty(logits.shape[0], 0)

    def drafted(self, step: Part, carried: Tensor) -> tuple[Tensor, Tensor]:
        return self._model.logits(self._model.hidden(step)), carried
