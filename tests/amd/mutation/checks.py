"""The check of each kernel file: a small problem that needs all of its masks, in memory that exposes a missing one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tests.amd.mutation import (
    attention_checks,
    cache_checks,
    latent_checks,
    metadata_checks,
    mixture_checks,
    model_checks,
    sampling_checks,
    segment_parts_check,
    sparse_checks,
    speculative_checks,
    state_checks,
)
from tests.amd.mutation.memory import Memory

CHECKS: dict[str, Callable[[Memory], None]] = {
    "attention/coded.py": attention_checks.decode_of_two_heads,
    "attention/decode.py": attention_checks.decode,
    # V has a narrower last block of columns.
    "attention/decode_columns.py": partial(
        attention_checks.decode, like=replace(attention_checks.DECODE_TILES, dim_block=32)
    ),
    "attention/decode_schedule.py": attention_checks.decode_schedule,
    "attention/plain_decode.py": attention_checks.plain_decode,
    "attention/extend.py": attention_checks.extend,
    "attention/extend_schedule.py": attention_checks.extend_schedule,
    "attention/finish.py": model_checks.finish,
    "attention/key_loop.py": attention_checks.extend,
    "attention/mask_bits.py": attention_checks.extend,
    "attention/merge.py": attention_checks.merges,
    "attention/merge_states.py": attention_checks.merge_sides,
    "attention/merge_within.py": partial(
        attention_checks.decode, like=replace(attention_checks.DECODE_TILES, merge_group=8)
    ),
    "attention/new_rows.py": attention_checks.storing_decode,
    "attention/pads.py": attention_checks.pads,
    "attention/query_block.py": attention_checks.extend,
    "attention/segment_decode.py": attention_checks.segments,
    "attention/segment_merge.py": attention_checks.segments,
    "attention/segments.py": attention_checks.segments_left_in_memory,
    "cache/codes.py": cache_checks.store,
    "cache/fold_rows.py": cache_checks.folds,
    "cache/move_rows.py": cache_checks.moves,
    "cache/rope.py": model_checks.rope_store,
    "cache/rope_store.py": model_checks.rope_store,
    "cache/store.py": cache_checks.store,
    "attention/segment_parts.py": segment_parts_check.segment_parts,
    "attention/softmax.py": sparse_checks.selected_attention,
    "latent/decode.py": latent_checks.latents,
    "latent/extend.py": latent_checks.latents,
    "latent/key_loop.py": latent_checks.latents,
    "latent/segment_decode.py": latent_checks.latent_segments,
    "cache/tails.py": cache_checks.tails,
    "experts/choose.py": mixture_checks.choose,
    "experts/combine.py": mixture_checks.combine,
    "experts/few_tokens.py": mixture_checks.few_tokens,
    "experts/product.py": model_checks.experts,
    "experts/sort_pairs.py": mixture_checks.sort_pairs,
    "metadata/check_pages.py": metadata_checks.check_pages,
    "metadata/chunk_starts.py": metadata_checks.chunk_starts,
    "metadata/device_inputs.py": metadata_checks.device_inputs,
    "metadata/draft_steps.py": metadata_checks.draft_steps,
    "metadata/fill_roles.py": metadata_checks.fill,
    "metadata/gather_table.py": metadata_checks.gather,
    "metadata/pack_mask.py": metadata_checks.pack_mask,
    "metadata/place_mask.py": metadata_checks.place_mask,
    "metadata/place_spans.py": metadata_checks.place_spans,
    "metadata/place_trees.py": metadata_checks.place_trees,
    "metadata/publish.py": metadata_checks.publish,
    "metadata/publish_engine.py": metadata_checks.publish_engine,
    "metadata/take_inputs.py": metadata_checks.take_inputs,
    "metadata/table_update.py": metadata_checks.table_update,
    "metadata/take_slots.py": metadata_checks.slots,
    "metadata/visible_ranges.py": metadata_checks.visible_ranges,
    "metadata/watch_pages.py": metadata_checks.watch_pages,
    "model/add_norm.py": model_checks.add_norm,
    "model/gate.py": model_checks.gate,
    "model/few_rows.py": model_checks.few_rows,
    "model/matrix_rows.py": model_checks.normed_product,
    "model/normed_product.py": model_checks.normed_product,
    "model/peer_sum.py": model_checks.peer_sum,
    "model/row_product.py": model_checks.row_product,
    "sampling/order.py": sampling_checks.pick_rows,
    "sampling/cut_rows.py": sampling_checks.cut_rows,
    "sampling/likeliest.py": sampling_checks.likeliest,
    "sampling/shape_rows.py": sampling_checks.shape_rows,
    "sparse/attention.py": sparse_checks.selected_attention,
    "sparse/candidates.py": sparse_checks.candidates,
    "sparse/check.py": sparse_checks.check_selection,
    "sparse/index_scores.py": sparse_checks.index_scores,
    "sparse/merge_parts.py": sparse_checks.selected_attention,
    "sparse/places.py": sparse_checks.top_k,
    "sparse/top_k.py": sparse_checks.top_k,
    "speculative/accept_drawn.py": speculative_checks.accept_drawn,
    "speculative/accept_sampled.py": speculative_checks.accept_sampled,
    "speculative/move_paths.py": speculative_checks.move_paths,
    "speculative/next_step.py": speculative_checks.next_step,
    "states/chunk_rows.py": state_checks.chunks,
    "states/chunk_walk.py": state_checks.chunks,
    "states/gated_norm.py": mixture_checks.gated_norm,
    "states/gates.py": mixture_checks.gates,
    "states/convolve.py": state_checks.convolution,
    "states/places.py": state_checks.places,
    "states/token_steps.py": state_checks.token_steps,
    "states/updates.py": state_checks.token_steps,
}


def run_check(path: str, memory: Memory) -> None:
    """Runs the check of a file in memory. Nothing around any of its tensors may be written."""
    CHECKS[path](memory)
    memory.assert_surroundings_untouched()
