"""Every launch of the project's own Triton kernels. Importing this imports Triton: see triton_later.py."""

from rocm_attn.kernels.attention.decode import launch_paged_decode, launch_storing_decode
from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule
from rocm_attn.kernels.attention.extend import launch_paged_extend
from rocm_attn.kernels.attention.extend_schedule import launch_extend_schedule
from rocm_attn.kernels.attention.finish import launch_finish
from rocm_attn.kernels.attention.merge_states import launch_merge_states
from rocm_attn.kernels.attention.pads import launch_clear_pads
from rocm_attn.kernels.attention.segment_decode import launch_segment_decode
from rocm_attn.kernels.attention.segment_extend import launch_segment_extend
from rocm_attn.kernels.cache.fold_rows import launch_fold_rows
from rocm_attn.kernels.cache.move_rows import launch_export_rows, launch_import_rows
from rocm_attn.kernels.cache.rope_store import launch_rope_queries, launch_rope_store
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_attn.kernels.cache.tails import launch_zero_tails
from rocm_attn.kernels.latent.decode import launch_latent_decode
from rocm_attn.kernels.latent.extend import launch_latent_extend
from rocm_attn.kernels.latent.segment_decode import launch_latent_segment_decode
from rocm_attn.kernels.latent.segment_extend import launch_latent_segment_extend
from rocm_attn.kernels.metadata.check_pages import launch_check_pages
from rocm_attn.kernels.metadata.chunk_starts import launch_chunk_starts
from rocm_attn.kernels.metadata.device_inputs import launch_device_inputs
from rocm_attn.kernels.metadata.draft_steps import launch_draft_steps
from rocm_attn.kernels.metadata.fill import launch_fill
from rocm_attn.kernels.metadata.gather_table import launch_gather_table
from rocm_attn.kernels.metadata.pack_mask import launch_pack_mask
from rocm_attn.kernels.metadata.place_mask import launch_place_mask
from rocm_attn.kernels.metadata.place_spans import launch_place_spans
from rocm_attn.kernels.metadata.place_trees import launch_place_trees
from rocm_attn.kernels.metadata.publish import launch_publish
from rocm_attn.kernels.metadata.publish_engine import launch_publish_engine
from rocm_attn.kernels.metadata.table_update import launch_table_update
from rocm_attn.kernels.metadata.take_inputs import launch_take_inputs
from rocm_attn.kernels.metadata.take_slots import launch_take_slots
from rocm_attn.kernels.metadata.visible_ranges import launch_visible_ranges
from rocm_attn.kernels.metadata.watch_pages import launch_watch_pages
from rocm_attn.kernels.sampling.cut_rows import launch_cut_rows
from rocm_attn.kernels.sampling.likeliest import launch_likeliest
from rocm_attn.kernels.sampling.pick_rows import launch_pick_rows
from rocm_attn.kernels.sampling.shape_rows import launch_shape_rows
from rocm_attn.kernels.sparse.attention import launch_selected_attention, launch_selected_segments
from rocm_attn.kernels.sparse.check import launch_check_selection
from rocm_attn.kernels.sparse.index_scores import launch_select
from rocm_attn.kernels.speculative.accept_drawn import launch_accept_drawn
from rocm_attn.kernels.speculative.accept_sampled import launch_accept_sampled
from rocm_attn.kernels.speculative.move_paths import launch_move_paths
from rocm_attn.kernels.speculative.next_step import launch_next_step
from rocm_attn.kernels.states.convolve import launch_convolve
from rocm_attn.kernels.states.places import launch_state_places
from rocm_attn.kernels.states.recur import launch_recur
from rocm_attn.providers.launches import StepOps

__all__ = [
    "OPS",
    "launch_chunk_starts",
    "launch_decode_schedule",
    "launch_extend_schedule",
    "launch_latent_decode",
    "launch_latent_extend",
    "launch_latent_segment_decode",
    "launch_latent_segment_extend",
    "launch_paged_decode",
    "launch_paged_extend",
    "launch_segment_decode",
    "launch_segment_extend",
    "launch_select",
    "launch_selected_attention",
    "launch_selected_segments",
    "launch_storing_decode",
    "launch_visible_ranges",
]

OPS = StepOps(
    publish=launch_publish,
    take_inputs=launch_take_inputs,
    device_inputs=launch_device_inputs,
    place_mask=launch_place_mask,
    draft_steps=launch_draft_steps,
    place_trees=launch_place_trees,
    place_spans=launch_place_spans,
    table_update=launch_table_update,
    fill=launch_fill,
    store_kv=launch_store_kv,
    rope_store=launch_rope_store,
    rope_queries=launch_rope_queries,
    finish=launch_finish,
    zero_tails=launch_zero_tails,
    fold_rows=launch_fold_rows,
    state_places=launch_state_places,
    convolve=launch_convolve,
    recur=launch_recur,
    clear_pads=launch_clear_pads,
    merge_states=launch_merge_states,
    publish_engine=launch_publish_engine,
    gather_table=launch_gather_table,
    check_pages=launch_check_pages,
    take_slots=launch_take_slots,
    pack_mask=launch_pack_mask,
    watch_pages=launch_watch_pages,
    export_rows=launch_export_rows,
    accept_drawn=launch_accept_drawn,
    accept_sampled=launch_accept_sampled,
    move_paths=launch_move_paths,
    next_step=launch_next_step,
    import_rows=launch_import_rows,
    check_selection=launch_check_selection,
    pick_rows=launch_pick_rows,
    shape_rows=launch_shape_rows,
    cut_rows=launch_cut_rows,
    likeliest=launch_likeliest,
)
