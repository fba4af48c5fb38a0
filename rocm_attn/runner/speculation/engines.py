"""What an engine's options ask for to draft."""

from __future__ import annotations

from dataclasses import replace

from rocm_attn.capture.check import CaptureCheck
from rocm_attn.capture.graphs import eager_steps_before_capture, recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadModel, BadSetting
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.runner.asking_picker import AskingPicker
from rocm_attn.runner.engine_runtime import model_over, runtime_for
from rocm_attn.runner.loading import LoadedModel, load_model
from rocm_attn.runner.options import EngineOptions
from rocm_attn.runner.speculation.draft_model import ModelDrafter
from rocm_attn.runner.speculation.methods import DRAFT_MODEL, OFF
from rocm_attn.runner.speculation.ngrams import NgramDrafter
from rocm_attn.runner.speculation.speculation import Drafter, NoSpeculation, Speculation
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.metrics import Metrics


def speculation_of(
    loaded: LoadedModel, options: EngineOptions, runtime: AttentionRuntime, picker: AskingPicker, metrics: Metrics
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
    max_kv_len = min(runtime.max_kv_len, small.config.context_len)
    page_size = runtime.pool.page_size
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
    drafting, _ = runtime_for(small, its_own)
    after = options.capture_after
    runner = StepRunner(
        drafting,
        model_over(drafting, small, its_own).forward,
        recorder_for(drafting.device) if options.graphs else None,
        check=CaptureCheck(vocabulary=small.config.vocab_size),
        capture_after=eager_steps_before_capture(drafting.device) if after is None else after,
    )
    return ModelDrafter(runner, drafting.table, chunk=options.chunk, num_branches=options.topk)
