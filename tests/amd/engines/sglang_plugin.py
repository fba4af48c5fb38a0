"""A test plug-in for SGLang in addition to ours: a pool of windows, and faults in the engine's steps.

SGLang's processes find it if the metadata of an installation is on their path.

ENGINE_WINDOW_POOL=1   gives layers with a window or chunks a pool of their own, which SGLang does for newer models
ENGINE_SPARSE=1        lets SGLang build a DeepSeek V3.2 on a CPU, in the dtype of the model
ENGINE_DRAFTS=1        gives SGLang the kernels around drafts, which no CPU wheel has
ENGINE_BLOCKS=1        lets SGLang draft blocks on a CPU, in the dtype of the model
ENGINE_OVERLAP=1       lets SGLang overlap two halves of a batch on a CPU
ENGINE_DETERMINISTIC=1 lets SGLang take its deterministic flag on a CPU
ENGINE_ROTATION=1      rotates q and k of Llama 4 in place, as SGLang does on GPUs; on a CPU it drops what it rotated
ENGINE_IMAGES=1        gives prompts images without pixels, where the model's config says
ENGINE_SPEECH=1        gives models of speech sound that follows from a prompt, and the prompt itself
ENGINE_GRAPHS=1        runs steps that decode or verify drafts in SGLang's runner of graphs, which no CPU has
ENGINE_RECURRENT=1     gives SGLang the operations of recurrent layers, which no CPU wheel has
ENGINE_HALVES_LOG=FILE with ENGINE_OVERLAP, receives a line of JSON for each batch of two halves
ENGINE_MODES_LOG=FILE  receives a line per process for each mode of the steps that our backend begins, and for MIXED
ENGINE_FAULTS_LOG=FILE once the file exists, one of FAULTS is planted in every fourth step that decodes or verifies
                       drafts. Each adds a line of JSON with planted (its name) and step, and each report a line with
                       reported and begun
ENGINE_STATE_FAULTS_LOG=FILE lets FILE.next request faults of states (sglang_state_faults.py), which FILE gets lines of
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.amd.engines import (
    sglang_cpu_deterministic,
    sglang_cpu_drafts,
    sglang_cpu_graphs,
    sglang_cpu_overlap,
    sglang_cpu_states,
)
from tests.amd.engines.models import IMAGE_PLACES
from tests.amd.engines.sglang_state_faults import StatePlanter

WINDOW_POOL, FAULTS_LOG, DRAFTS = "ENGINE_WINDOW_POOL", "ENGINE_FAULTS_LOG", "ENGINE_DRAFTS"
SPARSE, OVERLAP, HALVES_LOG, MODES_LOG = "ENGINE_SPARSE", "ENGINE_OVERLAP", "ENGINE_HALVES_LOG", "ENGINE_MODES_LOG"
ROTATION, IMAGES, BLOCKS = "ENGINE_ROTATION", "ENGINE_IMAGES", "ENGINE_BLOCKS"
SPEECH, GRAPHS = "ENGINE_SPEECH", "ENGINE_GRAPHS"
DETERMINISTIC, RECURRENT, STATES_LOG = "ENGINE_DETERMINISTIC", "ENGINE_RECURRENT", "ENGINE_STATE_FAULTS_LOG"
_STEPS_APART = 4

Undo = Callable[[], None]


def register() -> None:
    if os.environ.get(WINDOW_POOL) == "1":
        give_a_window_pool()
    if os.environ.get(SPARSE) == "1":
        build_sparse_models_on_a_cpu()
    if os.environ.get(DRAFTS) == "1":
        sglang_cpu_drafts.see_whole_masks()
        sglang_cpu_drafts.find_last_slots_in_torch()
    if os.environ.get(BLOCKS) == "1":
        sglang_cpu_drafts.allow_block_drafts()
        sglang_cpu_drafts.find_last_slots_in_torch()
    if os.environ.get(OVERLAP) == "1":
        sglang_cpu_overlap.overlap_on_a_cpu(Path(os.environ[HALVES_LOG]))
    if os.environ.get(DETERMINISTIC) == "1":
        sglang_cpu_deterministic.multiply_rows_by_themselves()
    if os.environ.get(ROTATION) == "1":
        rotate_in_place()
    if os.environ.get(IMAGES) == "1":
        give_images()
    if os.environ.get(SPEECH) == "1":
        hear_what_prompts_say()
    if os.environ.get(RECURRENT) == "1":
        sglang_cpu_states.replace_triton_kernels()
    if os.environ.get(GRAPHS) == "1":
        sglang_cpu_graphs.run_graphs_on_a_cpu()
    if MODES_LOG in os.environ:
        write_modes(Path(os.environ[MODES_LOG]))
    if FAULTS_LOG in os.environ:
        Planter(Path(os.environ[FAULTS_LOG])).plant()
    if STATES_LOG in os.environ and faults_of_states(Path(os.environ[STATES_LOG])).exists():
        StatePlanter(
            faults_of_states(Path(os.environ[STATES_LOG])), partial(_write, Path(os.environ[STATES_LOG]))
        ).plant()


def faults_of_states(log: Path) -> Path:
    """Returns the file that requests faults of states."""
    return log.with_suffix(".next")


def give_a_window_pool() -> None:
    from sglang.srt.arg_groups import model_override_base
    from sglang.srt.configs import model_config

    def layer_ids(architectures: Any, config: Any, *_: Any, **__: Any) -> tuple[list[int], list[int]]:
        full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
        return [i for i in range(len(config.layer_types)) if i not in full], full

    model_override_base._MODEL_OVERRIDE_FNS.pop("Gemma3ForCausalLM", None)
    model_config.is_hybrid_swa_model = lambda *_, **__: True
    model_config.get_hybrid_layer_ids = layer_ids


def build_sparse_models_on_a_cpu() -> None:
    """Replaces the GPU query of SGLang, which sets a dtype and kernels by the GPU's generation for such models."""
    import torch
    from sglang.srt.arg_groups import model_hook

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    model_hook._dsa_kv_cache_dtype_default = lambda _: {}


def rotate_in_place() -> None:
    from sglang.srt.layers import rotary_embedding

    get_rope = rotary_embedding.get_rope

    def of_llama4(*given: Any, **named: Any) -> Any:
        rope = get_rope(*given, **named)

        def rotate(positions: Any, q: Any, k: Any) -> Any:
            for here, rotated in zip((q, k), rope(positions, q, k), strict=True):
                here.copy_(rotated)
            return q, k

        return rotate

    from sglang.srt.models import llama4

    llama4.get_rope = of_llama4


def give_images() -> None:
    """Lets our backend find images in prompts of text. SGLang's own code for images sees none."""
    from types import SimpleNamespace

    from rocm_attn.integrations.sglang.hooks import AttentionHooks

    begin, make = AttentionHooks.init_forward_metadata, AttentionHooks.__init__

    def made(hooks: Any, runner: Any, *given: Any, **named: Any) -> None:
        make(hooks, runner, *given, **named)
        hooks.places = getattr(runner.model_config.hf_config, IMAGE_PLACES)

    def of_prompt(hooks: Any, kv_len: int) -> Any:
        places = [(first, last) for first, last in hooks.places if last < kv_len]
        return SimpleNamespace(mm_items=[SimpleNamespace(is_image=lambda: True, offsets=places)])

    def with_images(hooks: Any, batch: Any) -> None:
        if not batch.forward_mode.is_extend():
            begin(hooks, batch)
            return
        lengths = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
        before, batch.mm_inputs = batch.mm_inputs, [of_prompt(hooks, sum(each)) for each in lengths]
        try:
            begin(hooks, batch)
        finally:
            batch.mm_inputs = before

    AttentionHooks.__init__ = made  # type: ignore[method-assign,assignment]  # for this process
    AttentionHooks.init_forward_metadata = with_images  # type: ignore[method-assign,assignment]  # for this process


def hear_what_prompts_say() -> None:
    """Makes the sound of a request from its prompt's tokens. SGLang reads files, and asks every model the same."""
    import numpy as np
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
    from sglang.srt.multimodal.processors.whisper import WhisperProcessor

    async def heard(processor: Any, *_: Any, request_obj: Any, **__: Any) -> Any:
        extract = processor._processor.feature_extractor
        sound = np.random.default_rng(request_obj.input_ids).standard_normal(extract.n_samples)
        features = extract(sound, sampling_rate=extract.sampling_rate, padding="max_length", return_tensors="pt")
        item = MultimodalDataItem(feature=features["input_features"][0], modality=Modality.AUDIO)
        return MultimodalProcessorOutput(input_ids=request_obj.input_ids, mm_items=[item])

    WhisperProcessor.process_mm_data_async = heard


def write_modes(log: Path) -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from rocm_attn.integrations.sglang.hooks import AttentionHooks

    begin, mix = AttentionHooks.init_forward_metadata, ScheduleBatch.mix_with_running
    replay = AttentionHooks.init_forward_metadata_out_graph
    written: set[str] = set()

    def write(name: str) -> None:
        if name not in written:
            written.add(name)
            with log.open("a") as out:
                print(name, file=out)

    def noted(hooks: Any, forward_batch: Any) -> None:
        write(forward_batch.forward_mode.name)
        begin(hooks, forward_batch)

    def replayed(hooks: Any, forward_batch: Any, in_capture: bool = False) -> None:
        if not in_capture:
            write(f"{forward_batch.forward_mode.name}_GRAPH")
        replay(hooks, forward_batch, in_capture)

    def mixed(batch: Any, running: Any) -> None:
        write("MIXED")
        mix(batch, running)

    # SGLang labels a batch of prompts and decodes as one of prompts before a backend sees it.
    ScheduleBatch.mix_with_running = mixed
    AttentionHooks.init_forward_metadata = noted  # type: ignore[method-assign,assignment]  # for this process
    AttentionHooks.init_forward_metadata_out_graph = replayed  # type: ignore[method-assign,assignment]  # the same


def wrong_slot(hooks: Any, batch: Any) -> Undo:
    """Sends the first new token one page further than its table says."""
    slots = batch.out_cache_loc
    batch.out_cache_loc = slots.clone()
    batch.out_cache_loc[0] += 16

    def undo() -> None:
        batch.out_cache_loc = slots

    return undo


def lost_table(hooks: Any, batch: Any) -> Undo:
    """Gives the first sequence a row that was cleared."""
    table, row = hooks.req_to_token_pool.req_to_token, int(batch.req_pool_indices[0])
    before = table[row].clone()
    table[row] = 0

    def undo() -> None:
        table[row] = before

    return undo


def stale_length(hooks: Any, batch: Any) -> Undo:
    """Gives the first sequence the length of another one, past its own pages."""
    lengths = batch.seq_lens
    batch.seq_lens = lengths.clone()
    batch.seq_lens[0] += 64

    def undo() -> None:
        batch.seq_lens = lengths

    return undo


def evicted_window(hooks: Any, batch: Any) -> Undo:
    """Frees the pages that the first sequence's window still sees, except for the page of its new token."""
    mapped = hooks.token_to_kv_pool.full_to_swa_index_mapping
    last = int(batch.seq_lens[0]) - 1
    slots = hooks.req_to_token_pool.req_to_token[batch.req_pool_indices[0], : last - last % 16].long()
    before = mapped[slots].clone()
    mapped[slots] = 0

    def undo() -> None:
        mapped[slots] = before

    return undo


FAULTS: tuple[Callable[[Any, Any], Undo], ...] = (wrong_slot, lost_table, stale_length)
# Additional faults if layers with a window have a pool of their own.
WINDOW_FAULTS: tuple[Callable[[Any, Any], Undo], ...] = (evicted_window,)


class Planter:
    """Plants each fault once in a step's metadata. The fault is undone in the engine's tensors before layers run."""

    def __init__(self, log: Path) -> None:
        windows = WINDOW_FAULTS if os.environ.get(WINDOW_POOL) == "1" else ()
        self.log, self.decoded, self.left = log, 0, [*FAULTS, *windows]

    def plant(self) -> None:
        from rocm_attn.integrations.sglang.hooks import AttentionHooks

        begin = AttentionHooks.init_forward_metadata

        def planted(hooks: Any, forward_batch: Any) -> None:
            batch, mode = forward_batch, forward_batch.forward_mode
            goes_on = mode.is_decode() or mode.is_target_verify()
            if not self.log.exists() or not goes_on or int(batch.seq_lens[0]) < 20:
                begin(hooks, batch)
                return
            hooks.on_fault = lambda fault: self.write(reported=str(fault), begun=hooks.attention.step_number)
            self.decoded += 1
            if self.decoded % _STEPS_APART or not self.left:
                begin(hooks, batch)
                return
            fault = self.left.pop(0)
            undo = fault(hooks, batch)
            try:
                begin(hooks, batch)
            finally:
                undo()
            self.write(planted=fault.__name__, step=hooks.attention.step_number)

        AttentionHooks.init_forward_metadata = planted  # type: ignore[method-assign,assignment]  # for this process

    def write(self, **line: Any) -> None:
        _write(self.log, **line)


def _write(log: Path, **line: Any) -> None:
    with log.open("a") as out:
        print(json.dumps(line), file=out)
