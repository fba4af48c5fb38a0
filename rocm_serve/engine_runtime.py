"""Builds an engine's AttentionRuntime: chooses the page size, and sizes the KV pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from rocm_attn.batch.drafts import Drafts
from rocm_attn.capture.check import CaptureCheck
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadSetting, NeverFits
from rocm_attn.kernels.tuning.tiles import next_power_of_2
from rocm_attn.machine.target import detect_target
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.paging.checkpoints import StateMemory, spacing_of
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.paging.state_pool import RecurrentLayers
from rocm_attn.problem import UNLIMITED_WINDOW, AllKeys, KVEncoding, Problem, Scales
from rocm_attn.providers.select import Selection, select
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.selection.kernels import missing_kernels
from rocm_attn.selection.kv_formats import KVFormat
from rocm_attn.selection.pages import PageChoice, choose_pages, open_page_sizes, open_pools
from rocm_attn.step.kv_scales import KVScales
from rocm_attn.step.options import RuntimeOptions
from rocm_serve.measured_memory import NO_GRAPHS, GraphMemory, LargestSteps, free_of, measure, memory_of
from rocm_serve.models.linears import linears_over
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.model import Model
from rocm_serve.models.weight_bytes import matrices_of
from rocm_serve.options import EngineOptions
from rocm_serve.pool_size import CPU_BYTES, NOT_MEASURED, MeasuredMemory, PoolPages, is_small, most_kv_bytes, pool_pages
from rocm_serve.speculation.device_steps import speculative_bytes
from rocm_serve.speculation.draft_runners import drawn_bytes
from rocm_serve.speculation.last_rows import forward_of


@dataclass(frozen=True, slots=True)
class Beside:
    """A draft model, which keeps K and V of the same tokens in a pool of its own.

    layers:      that keep K and V
    make_graphs: makes its largest graphs, over a runtime of the model
    """

    layers: tuple[AttentionLayer, ...] = ()
    make_graphs: Callable[[AttentionRuntime], GraphMemory] = lambda runtime: NO_GRAPHS


NOTHING_BESIDE = Beside()


@dataclass(frozen=True, slots=True)
class StepForms:
    """The steps of an engine's runtime in addition to those that decode and those that take in prompts.

    verify_tokens: see RuntimeOptions
    prompt_tokens: likewise
    masks:         whether trees of tokens are verified or drafted
    drafts:        rounds that draft
    beside:        the draft model
    """

    verify_tokens: int = 0
    prompt_tokens: tuple[int, ...] = ()
    masks: bool = False
    drafts: tuple[Drafts, ...] = ()
    beside: Beside = NOTHING_BESIDE

    @classmethod
    def of(cls, loaded: LoadedModel, options: EngineOptions, beside: Beside) -> StepForms:
        """The forms of an engine; with speculation, those that verify draft tokens."""
        verify_tokens, has_masks = (options.rows_of_each, options.topk > 1) if options.speculates else (0, False)
        device, config = loaded.weights.device, loaded.config
        if not captures_all_steps(options, device) or (device.type == "cpu" and not options.speculates):
            return cls(masks=has_masks, beside=beside)
        matrices = matrices_of(config, loaded.weights.dtype, loaded.ranks.shard.num_ranks)
        elements = matrices.flops / 2 / config.num_layers
        sizes = prompt_sizes(options.chunk, elements, has_states=bool(config.attention.recurrent))
        return cls(verify_tokens, sizes, has_masks, beside=beside)


# A host takes 0.35 to 1 ms to launch a layer (16 layers of 61 million elements, H100 and H200, prompts and sequences
# that decode), and in 0.7 a GPU multiplies this many elements with a token each, at 400 TFLOP/s. Longer steps gain
# nothing by a graph, whose memory K and V would miss.
_PRODUCTS_OF_A_LAUNCHED_LAYER = 1.4e11
# Layers of a model with recurrent layers, of which most have experts too, take about this many times as long to launch
# (8 layers of Qwen3-Next-80B-A3B, H200).
_TIMES_WITH_STATES = 4
# The small sizes are for the last parts of a long prompt next to sequences that decode.
_SHARES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def prompt_sizes(chunk: int, elements: float, *, has_states: bool = False) -> tuple[int, ...]:
    """Token counts that steps with prompts are padded to: the chunk, up to a bound, and shares of that.

    elements:   of a layer's matrices that a token is multiplied with
    has_states: whether layers are recurrent
    """
    launched = _PRODUCTS_OF_A_LAUNCHED_LAYER * (_TIMES_WITH_STATES if has_states else 1)
    most = min(chunk, next_power_of_2(int(launched / elements) + 1))
    # A token that is decoded and two of a prompt are the least: with one of each a step only decodes.
    return tuple(sorted({-(-most * share // _SHARES[-1]) for share in _SHARES} - {1, 2}))


def captures_all_steps(options: EngineOptions, device: torch.device) -> bool:
    """True if graphs are made of steps that hold pads for each sequence.

    On a CPU the pads of such a step cost more than its graph saves, so it has one only if graphs are requested.
    """
    return options.graphs and not (device.type == "cpu" and options.capture_after is None)


def runtime_for(
    loaded: LoadedModel, options: EngineOptions, beside: Beside = NOTHING_BESIDE
) -> tuple[AttentionRuntime, MeasuredMemory]:
    """Calls runtime_with for the steps that the options need. beside: see StepForms"""
    return runtime_with(loaded, options, StepForms.of(loaded, options, beside))


def runtime_with(
    loaded: LoadedModel, options: EngineOptions, forms: StepForms
) -> tuple[AttentionRuntime, MeasuredMemory]:
    """A runtime whose pool holds max_batch_size sequences of full length, or as many as the memory allows.

    If neither kv_bytes nor num_pages is given, and the room on a GPU is not plentiful, the model's largest steps are
    run over a small pool first, and the measurement is returned; otherwise NOT_MEASURED. Ranks that share a model call
    this at the same time.
    Raises BadSetting, Unsupported, NeverFits.
    """
    _check_layers(loaded, options)
    over, max_kv_len = problems_of(loaded, options), _max_kv_len(loaded, options)
    if forms.masks:
        over = tuple(replace(problem, custom_mask=True) for problem in over)
    problems = _page_choice(over, loaded, options).problems(over)
    if options.swa_pages and all(problem.window_left == UNLIMITED_WINDOW for problem in problems):
        raise BadSetting(
            f"swa_pages is {options.swa_pages}, and no layer of the model has a window shorter than max_kv_len, "
            f"{max_kv_len}; leave it out"
        )
    sizing = _Sizing(loaded, options, problems, max_kv_len, forms)
    kv_bytes, measured = sizing.kv_bytes()
    pages = sizing.pages(kv_bytes)
    # a sequence cannot outgrow the pool
    longest = min(max_kv_len, (pages.full - 1) * problems[0].page_size)
    return sizing.runtime(pages, longest, sizing.checkpoints(pages.full * page_bytes(problems))), measured


def problems_of(loaded: LoadedModel, options: EngineOptions) -> tuple[Problem, ...]:
    """One problem for each layer that keeps K and V, over pages of one token. Raises BadSetting, Unsupported."""
    config, weights = loaded.config, loaded.weights
    geometry = config.attention.without_idle_windows(_max_kv_len(loaded, options))
    attending = (weights.layers[place] for place in config.places)
    has_scales = all(layer.kv_scale_values is not None for layer in attending)
    kv = KVFormat.named(options.kv_dtype, options.kv_scales, detect_target(weights.device), has_scales=has_scales)
    return geometry.problems(dtype=weights.dtype, page_size=1, kv=kv)


def recurrent_of(loaded: LoadedModel, options: EngineOptions, page_size: int) -> RecurrentLayers:
    """The model's recurrent layers, whose states may go back by the draft tokens of a step. Raises BadProblem."""
    recurrences = loaded.config.attention.recurrences(loaded.weights.dtype)
    return RecurrentLayers(recurrences, kept=options.rows_of_each, spacing=spacing_of(page_size, options.chunk))


def _check_layers(loaded: LoadedModel, options: EngineOptions) -> None:
    """Raises BadSetting for options that do not fit the model's layers."""
    if options.state_checkpoints is not None and not loaded.config.attention.recurrent:
        raise BadSetting(
            f"state_checkpoints is {options.state_checkpoints} and the model has no recurrent layers; leave it out"
        )
    if options.topk > 1 and options.speculates:
        attention = loaded.config.attention
        if attention.recurrent:
            raise BadSetting(
                f"topk is {options.topk} and the model has recurrent layers, whose states follow one chain of tokens; "
                "use topk 1"
            )
        if any(not isinstance(layer.indexer, AllKeys) for layer in attention.layers):
            raise BadSetting(
                f"topk is {options.topk} and the model has layers with an indexer, which chooses keys of other "
                "branches too; use topk 1"
            )


def _max_kv_len(loaded: LoadedModel, options: EngineOptions) -> int:
    context_len = loaded.config.context_len
    max_kv_len = context_len if options.max_kv_len is None else options.max_kv_len
    if max_kv_len > context_len:
        raise BadSetting(f"max_kv_len is {max_kv_len}; it must be at most the model's context, {context_len}")
    return max_kv_len


def model_over(runtime: AttentionRuntime, loaded: LoadedModel, options: EngineOptions) -> Model:
    """The model, with its attention on a runtime, which gets the model's scales of eight-bit K and V, if any."""
    config = loaded.config
    for layer, place in enumerate(config.places[: config.attention.num_storing]):
        scale_values, form = loaded.weights.layers[place].kv_scale_values, runtime.pool.layer(layer).format
        if scale_values is not None and form.scales in (Scales.LAYER, Scales.HEAD):
            k, v = (torch.full(form.scale_shape, scale_value) for scale_value in scale_values)
            runtime.set_kv_scales(layer, KVScales(k, v, made_for=KVEncoding.E4M3FN))
    return Model(
        config,
        loaded.weights,
        runtime.head_weights,
        max_kv_len=runtime.max_kv_len,
        ranks=loaded.ranks,
        linears=linears_over(loaded.ranks, deterministic=options.deterministic),
    )


@dataclass(frozen=True, slots=True)
class _Sizing:
    """Sizes the pool. problems: one per layer, over pages that were chosen"""

    loaded: LoadedModel
    options: EngineOptions
    problems: Sequence[Problem]
    max_kv_len: int
    forms: StepForms

    @property
    def states(self) -> StateMemory:
        """The memory of recurrent layers' states."""
        page_size = self.problems[0].page_size
        recurrent = recurrent_of(self.loaded, self.options, page_size)
        return StateMemory(recurrent, self._num_rows + 1, page_bytes(self.problems), page_size)

    @property
    def _num_rows(self) -> int:
        return self.options.max_batch_size + 1  # one for Engine.probe_truth, however many run

    def checkpoints(self, kv_bytes: int) -> int:
        """States that the prefix cache keeps, next to pages of kv_bytes."""
        if not self.options.prefix_caching:
            return 0
        if self.options.state_checkpoints is not None:
            return self.options.state_checkpoints
        return self.states.checkpoints(kv_bytes)

    def kv_bytes(self) -> tuple[int, MeasuredMemory]:
        """Memory for K and V, and its measurement. A requested size is not cut to the free memory.

        The memory for K and V of the draft model, which has room for as many tokens, is subtracted, and so is that of
        the states that the prefix cache keeps. A measured size has the states of requests subtracted too.
        """
        own, (num_bytes, measured) = page_bytes(self.problems), self._all_kv_bytes()
        return num_bytes * own // (own + self._beside_bytes), measured

    @property
    def _beside_bytes(self) -> int:
        """Bytes of the draft model's K and V for the tokens of a page."""
        first = self.problems[0]
        return page_bytes(
            [layer.problem(dtype=first.dtype, page_size=first.page_size) for layer in self.forms.beside.layers]
        )

    def _all_kv_bytes(self) -> tuple[int, MeasuredMemory]:
        options, device = self.options, self.loaded.weights.device
        if options.kv_bytes is not None:
            return self._without_checkpoints(options.kv_bytes), NOT_MEASURED
        if options.num_pages is not None:
            return options.num_pages * (page_bytes(self.problems) + self._beside_bytes), NOT_MEASURED
        memory = memory_of(device)
        if memory is None:
            return self._without_checkpoints(CPU_BYTES), NOT_MEASURED
        ranks = self.loaded.ranks  # all of them have as many pages as the one with the least memory
        of_drafts = drawn_bytes(options, self.loaded.config.vocab_size) + speculative_bytes(options, self.max_kv_len)
        of_rows = self.states.of_rows
        free = max(0, ranks.least(free_of(memory)) - of_drafts - of_rows)
        wanted = most_kv_bytes(
            self.problems, max_num_seqs=options.max_batch_size, max_kv_len=self.max_kv_len, chunk=self.options.chunk
        )
        wanted += (1 + options.max_batch_size * num_pages(self.max_kv_len, self.problems[0].page_size)) * (
            self._beside_bytes
        )
        if is_small(wanted + self.states.of_checkpoints(self.checkpoints(wanted)), free):
            return wanted, NOT_MEASURED
        steps = self._largest_steps(free)
        measured = measure(
            memory,
            partial(self._for_measuring, steps),
            steps,
            self.forms.beside.make_graphs,
            vocabulary=self.loaded.config.vocab_size,
        )
        # The draft tensors are allocated after the pool.
        measured = replace(measured, step=measured.step + of_drafts)
        left = measured.kv_bytes(options.gpu_memory_share, self.problems, state_bytes=of_rows)
        return ranks.least(self._without_checkpoints(left)), measured

    def _without_checkpoints(self, num_bytes: int) -> int:
        """Memory for K and V, out of that for them and checkpoints. Raises NeverFits."""
        options = self.options
        if not options.prefix_caching:
            return num_bytes
        if options.state_checkpoints is None:
            return self.states.kv_bytes(num_bytes)
        of_states = self.states.of_checkpoints(options.state_checkpoints)
        if of_states >= num_bytes:
            raise NeverFits(
                f"state_checkpoints is {options.state_checkpoints}, which takes {of_states} bytes, and {num_bytes} are "
                "left for K and V and for them; lower state_checkpoints, or leave it out"
            )
        return num_bytes - of_states

    def pages(self, kv_bytes: int) -> PoolPages:
        """The page counts that were requested, and for the others as many as can be used and fit."""
        options = self.options
        pages = pool_pages(
            self.problems,
            max_num_seqs=options.max_batch_size,
            max_kv_len=self.max_kv_len,
            chunk=self.options.chunk,
            kv_bytes=kv_bytes,
        )
        full = pages.full if options.num_pages is None else options.num_pages
        return PoolPages(full, min(pages.swa, full) if options.swa_pages is None else options.swa_pages)

    def runtime(self, pages: PoolPages, max_kv_len: int, checkpoints: int) -> AttentionRuntime:
        """A runtime with these pages, and states that the prefix cache may keep.

        max_kv_len: of a sequence; it sizes tables and other memory
        """
        return build_runtime(
            self.problems,
            RuntimeOptions(
                num_pages=pages.full,
                swa_pages=pages.swa,
                max_num_seqs=self.options.max_batch_size,
                max_kv_len=max_kv_len,
                max_num_rows=self._num_rows,
                provider=self.options.provider,
                verify_tokens=self.forms.verify_tokens,
                prompt_tokens=self.forms.prompt_tokens,
                drafts=self.forms.drafts,
                deterministic=self.options.deterministic,
            ),
            recurrent=replace(self.states.recurrent, checkpoints=checkpoints),
            device=self.loaded.weights.device,
            agree=self.loaded.ranks.agree,
        )

    def _largest_steps(self, free_bytes: int) -> LargestSteps:
        """Steps whose small pool takes at most half of the free memory."""
        page_size, affordable = self.problems[0].page_size, free_bytes // page_bytes(self.problems)
        num_seqs = self.options.max_batch_size
        # Steps with prompts are captured at a size of all sequences, whatever each one's part of it is.
        most_captured = max(1, -(-max(self.forms.prompt_tokens, default=0) // num_seqs))
        captured = max(self.forms.verify_tokens, most_captured)
        num_tokens = max(num_seqs * captured, self.options.chunk)
        steps = LargestSteps(num_seqs, num_tokens, self.max_kv_len, affordable * page_size, captured)
        most = steps.longest - max(0, steps.pages(page_size) - affordable // 2) * page_size
        return replace(steps, longest=min(steps.longest, max(most, page_size)))

    def _for_measuring(self, steps: LargestSteps) -> tuple[AttentionRuntime, StepRunner]:
        """A runtime with a small pool, and a runner over it that makes a graph as soon as it can."""
        pages = steps.pages(self.problems[0].page_size)
        has_swa = self.pages(page_bytes(self.problems) * pages).swa > 0
        runtime = self.runtime(PoolPages(pages, pages if has_swa else 0), self.max_kv_len, 0)
        recorder = recorder_for(runtime.device) if self.options.graphs else None
        check = CaptureCheck(vocabulary=self.loaded.config.vocab_size)
        return runtime, StepRunner(
            runtime, forward_of(model_over(runtime, self.loaded, self.options), self.options), recorder, check=check
        )


def _page_choice(problems: Sequence[Problem], loaded: LoadedModel, options: EngineOptions) -> PageChoice:
    """The pages of the options; open options are chosen. Raises Unsupported if none have kernels."""
    target = detect_target(loaded.weights.device)
    missing = loaded.ranks.agree(missing_kernels(target, options.provider))

    def choose(problem: Problem) -> Selection:
        return select(problem, target, options.provider, unavailable=missing, deterministic=options.deterministic)

    return choose_pages(problems, choose, open_page_sizes(options.page_size), open_pools(options.pool))
