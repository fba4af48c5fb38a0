"""What an engine's options ask for to draft."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.errors import BadModel, BadSetting
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.runner.engine_runtime import StepForms, captures_all_steps, model_over, runtime_with
from rocm_attn.runner.loading import LoadedModel, load_model
from rocm_attn.runner.model import Model
from rocm_attn.runner.options import EngineOptions
from rocm_attn.runner.sampling import TokenPicker
from rocm_attn.runner.speculation.draft_model import ModelDrafter
from rocm_attn.runner.speculation.draft_runners import DraftRunners, drafts_of, num_levels
from rocm_attn.runner.speculation.methods import DRAFT_MODEL, OFF
from rocm_attn.runner.speculation.ngrams import NgramDrafter
from rocm_attn.runner.speculation.speculation import Drafter, NoSpeculation, Speculation
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.metrics import Metrics
from rocm_attn.step.step import Step


def speculation_of(
    loaded: LoadedModel, options: EngineOptions, runtime: AttentionRuntime, picker: TokenPicker, metrics: Metrics
) -> Speculation | NoSpeculation:
    """What drafts and picks. Raises BadModel, BadSetting, CapacityExceeded for a small model that cannot draft."""
    if not options.speculates:
        return NoSpeculation(picker)
    return Speculation(_drafter(loaded, options, runtime), runtime, picker, options.draft_tokens, metrics)


def _drafter(loaded: LoadedModel, options: EngineOptions, runtime: AttentionRuntime) -> Drafter:
    if not options.speculative.startswith(DRAFT_MODEL):
        return NgramDrafter(options.topk)
    if loaded.ranks.shard.num_ranks > 1:
        raise BadSetting(
            f"speculative is {options.speculative} and {loaded.ranks.shard.num_ranks} ranks share the model; a small "
            "model drafts on one rank, so take speculative ngram or one rank"
        )
    small = load_model(
        options.speculative.removeprefix(DRAFT_MODEL), dtype=loaded.weights.dtype, device=loaded.weights.device
    )
    return model_drafter(small, loaded, options, runtime)


def model_drafter(
    small: LoadedModel, large: LoadedModel, options: EngineOptions, runtime: AttentionRuntime
) -> ModelDrafter:
    """A small model that drafts for a large one.

    Its pool holds as many sequences as the engine may run, of full length. It has one pool for all layers: K and V that
    have left a window may be needed again, after drafts that were rejected.
    options, runtime: of the large model's engine
    Raises BadModel for a model with other tokens, CapacityExceeded for a pool that cannot be.
    """
    if small.config.vocab_size != large.config.vocab_size:
        raise BadModel(
            f"the model that drafts has {small.config.vocab_size} tokens and the one that it drafts for "
            f"{large.config.vocab_size}; take one that shares them"
        )
    page_size, drafts = runtime.pool.page_size, drafts_of(options)
    max_kv_len = min(runtime.max_kv_len + drafts.tokens, small.config.context_len)
    few = 2 if options.topk == 1 else 1 + num_levels(options)
    its_own = replace(
        options,
        speculative=OFF,
        topk=1,
        page_size=page_size,
        pool="auto",
        kv_dtype="auto",
        kv_scales="auto",
        max_kv_len=max_kv_len,
        num_pages=1 + options.max_batch_size * num_pages(max_kv_len, page_size),
        kv_bytes=None,
        swa_pages=0,
    )
    forms = StepForms(
        verify_tokens=few if captures_all_steps(options, runtime.device) else 0,
        masks=options.topk > 1,
        drafts=tuple(each for each in (drafts,) if isinstance(each, Drafts)),
    )
    drafting, _ = runtime_with(small, its_own, forms)
    model = SmallModel(model_over(drafting, small, its_own))
    runners = DraftRunners(drafting, model, options, vocabulary=small.config.vocab_size)
    return ModelDrafter(runners, drafting.table, chunk=options.chunk, few=few)


class SmallModel:
    """A whole model that drafts: all that it hands on from token to token are K and V."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.nothing_carried = torch.empty(0, 0, dtype=model.weights.dtype, device=model.weights.device)

    def taken_in(self, step: Step) -> tuple[Tensor, Tensor]:
        """As of DraftingModel."""
        logits = self._model.forward(step)
        return logits, self.nothing_carried.new_empty(logits.shape[0], 0)

    def drafted(self, step: Step, carried: Tensor) -> tuple[Tensor, Tensor]:
        """As of DraftingModel."""
        return self._model.logits(self._model.hidden(step)), carried
