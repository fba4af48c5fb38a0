"""The numbers that kernels may meet, of arguments, grids and loaded values, and why: the one table of the proofs that
indices do not overflow (rocm_lab/races/overflow.py).

Limits of what is computed are conditions: intervals do not show them, for instance that a sum over the sequences of a
step is at most the step's number of tokens.
"""

from dataclasses import dataclass
from functools import cache

from rocm_attn.batch.step_batch import INT32_MAX, MOST_TOKENS
from rocm_attn.kernels.experts.sort_pairs import MOST_PAIRS
from rocm_attn.kernels.model.few_rows import MOST_ROWS
from rocm_attn.kernels.model.normed_product import MOST_TILES
from rocm_attn.kernels.states.arguments import MOST_TOKEN_STRIDE
from rocm_lab.races.overflow import needed_ranges, prove_no_overflow

_MOST_PROGRAMS = 2**20  # of a grid
_MOST_SHARING = 2**13  # compute units times programs of each
_MOST_HEADS = 2**9
_BLOCKS = MOST_TOKENS // 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of numbers: of names, in all kernels, or of these kernels' own ones. why: they hold"""

    names: str
    low: int
    high: int
    why: str
    kernels: str = ""

    def ranges(self) -> dict[str, tuple[int, int]]:
        """By the names that the proof looks for."""
        kernels = [f"_{each}_kernel " for each in self.kernels.split()] or [""]
        return {kernel + name: (self.low, self.high) for kernel in kernels for name in self.names.split()}


_STRIDES = """
a_head a_token b_head b_token beta_token block_table_stride csr_stride decay_head decay_token draft_row entry_stride
gate_head gate_token gates_page gates_token given_stride inputs_row inputs_slot k_head k_key k_page k_token
kept_change_head kept_change_row kept_change_slot kept_decay_head kept_decay_row kept_decay_slot kept_k_head kept_k_row
kept_k_slot kp_group kp_head kp_page kp_token kp_vector kv_len_stride kv_stride logits_stride lse_a_token lse_b_token
lse_head lse_token map_stride mask_start_stride out_head out_row out_token p_group p_inner p_outer p_page p_token
page_bytes parents_row positions_stride q_head q_stride q_token row_stride rows_stride rows_token scores_line state_head
state_row state_slot table_row table_stride target_row text_row token_bytes token_ids_stride v_head v_token values_page
values_token vp_group vp_head vp_page vp_token vp_vector w_head w_token weight_expert weight_row x_row x_token
"""
_LENGTHS = """
device_kv_len first_key first_writable key_end kv_bound kv_len limit mask_start pad_kv_len position_of_token positions
prefix_len span_begin span_end stored visible_end visible_first window_start
"""
_COUNTS = """
block_table_width device_q_len end_token first_page first_token group_end indptr keys_before max_q_len
min_q_len most_q_len nodes_before num_bytes num_cells num_checks num_drawing num_equal num_given num_mask_starts
num_nodes num_parents num_positions num_seqs num_seqs_padded num_token_ids num_tokens num_tokens_padded num_trees
num_updates num_window_starts num_words order pad_q_len page_list_len pending q_indptr q_len table_width vocab width
"""
LIMITS = (
    Limits(_STRIDES, 0, INT32_MAX, "torch has no negative strides, and larger ones are arguments of 64 bits"),
    Limits(
        "kp_head* kp_page* kp_token* out_head* out_token* q_head* q_token* vp_head* vp_page* vp_token*",
        0,
        INT32_MAX,
        "strides that are counted in units are below 2^31 (AttendArgs.stride_unit)",
    ),
    Limits(_LENGTHS, -1, MOST_TOKENS, "max_kv_len is at most 2^28 (request_table.py, external.py)"),
    Limits(_COUNTS, 0, MOST_TOKENS, "a step has at most 2^28 new tokens (step_batch.py), and tables no more columns"),
    Limits(
        "counts last_key_of_token row_of_token schedule seq_of_token source", -1, MOST_TOKENS, "counts, and -1 for none"
    ),
    Limits("engine_row num_rows row_of_seq", 0, INT32_MAX - 1, "rows are int32 (request_table.py)"),
    Limits("row_of_seq", 0, 2**30 - 1, "two slots of each row are int32 (row_states.py)", "state_places"),
    Limits("num_pages table", -1, INT32_MAX, "slots of a pool are int32 (kv_pool.py)"),
    Limits("window_left window_right", -1, 2**30, "wider windows are cut (problem.py)"),
    Limits("chunk", 0, INT32_MAX, "problem.py"),
    Limits("beta_token decay_token k_token q_token v_token", 0, MOST_TOKEN_STRIDE, "state_layers.py", "chunk_rows"),
    Limits("max_blocks most_keys", 0, _BLOCKS, "a query block has 16 rows or more"),
    Limits("num_parts part_keys splits", 1, 2**14, "sparse/cuts.py"),
    Limits("list_shares row_shares shares token_shares", 1, 2**12, "programs of a sequence"),
    Limits("branches num_spans steps", 0, 2**12, "drafts and spans of a sequence"),
    Limits("program_y", 0, 2**12, "drafts of a sequence", "draft_steps"),
    Limits("width", 0, 2**10, "drafts of a sequence", "next_step"),
    Limits("rows", 0, MOST_ROWS, "few_rows.py", "few_rows"),
    Limits("tiles", 0, MOST_TILES, "normed_product.py", "normed_product"),
    Limits("num_pairs", 0, MOST_PAIRS, "sort_pairs.py", "sort_pairs"),
    Limits("blocks", 0, MOST_TOKENS, "a grid covers tokens, sequences or elements, and a block more"),
    *(
        Limits(f"program_{axis} programs_{axis}", 0, _MOST_PROGRAMS, "a grid has at most a million programs")
        for axis in "xyz"
    ),
)
_BY_SCHEDULE = "decode latent_decode segment_decode latent_segment_decode"
_BY_SHARES = "extend segment_extend latent_extend latent_segment_extend"
_MERGES = "merge extend_merge segment_merge segment_parts"
CONDITIONS = (
    Limits(
        "num_programs program_x",
        0,
        _MOST_SHARING,
        "rows are shared among at most 8192 programs",
        f"schedule {_BY_SCHEDULE} {_BY_SHARES} {_MERGES}",
    ),
    Limits("%take %work", 0, MOST_TOKENS, "a program's work is in its row", f"{_BY_SCHEDULE} {_BY_SHARES}"),
    Limits("%done", 0, _BLOCKS, "a program's work is in its row", _BY_SCHEDULE),
    Limits("%first %kv_index %row_start", 0, MOST_TOKENS, "a program's work is in its row", _BY_SCHEDULE),
    Limits("%row %ratio_head", 0, _MOST_HEADS, "a layer has at most 512 heads", f"{_BY_SCHEDULE} {_BY_SHARES}"),
    Limits("%line", 0, 2 * _MOST_SHARING * 128, "a part is in the workspace", _BY_SCHEDULE),
    Limits(
        "%began %first_program %num_parts %number",
        0,
        _MOST_SHARING,
        "a row's parts are in the workspace",
        "merge extend_merge segment_merge segment_parts",
    ),
    Limits("%part", 0, 2 * _MOST_SHARING, "a row's parts are in the workspace", "merge extend_merge"),
    Limits("%at %line", 0, 2 * _MOST_SHARING * 128, "a row's parts are in the workspace", "merge extend_merge"),
    Limits("%first_position", 0, MOST_TOKENS, "a row's parts are in the workspace", "merge"),
    Limits("%rows", 0, _BLOCKS, "a row's parts are in the workspace", "merge"),
    Limits("%words", 0, 8 * _BLOCKS, "a share's blocks are in its schedule", "extend_merge segment_parts"),
    Limits("%head %num_lines", 0, 128 * _MOST_HEADS, "a layer has at most 512 heads", "extend_merge segment_parts"),
    Limits("%first_head %head", 0, _MOST_HEADS, "a layer has at most 512 heads", "merge"),
    Limits("%query_block", 0, _BLOCKS, "a share's blocks are in its schedule", _BY_SHARES),
    Limits(
        "%mask_len", 0, 2**24, "at most 2^24 keys of a sequence have cells of a mask", f"{_BY_SCHEDULE} {_BY_SHARES}"
    ),
    Limits("%before %total", 0, MOST_TOKENS, "sums over sequences are at most those of the step", "fill"),
    Limits("%list_share %row_share", -_MOST_PROGRAMS, _MOST_PROGRAMS, "a grid has at most a million programs", "fill"),
    Limits(
        "%end_token %first_token %num_wrong %tokens_before",
        0,
        MOST_TOKENS,
        "sums over sequences are at most those of the step",
        "check_pages place_mask place_spans place_trees",
    ),
    Limits("%num_seqs %num_token_ids %num_tokens", 0, MOST_TOKENS, "a step is published whole", "publish take_inputs"),
    Limits(
        "%middle %num_rows %shift %tile",
        0,
        MOST_TOKENS,
        "a place is in the sequence that is found for it",
        "chunk_rows convolve",
    ),
    Limits("%num_blocks", 0, _BLOCKS, "sums over experts are at most all pairs", "expert_product"),
    Limits("%begin", 0, MOST_PAIRS, "sums over experts are at most all pairs", "sort_pairs"),
    Limits("%place", 0, MOST_TOKENS, "a block is in its expert's pairs", "expert_product"),
    Limits(
        "%low %part %second %span %step %third %fourth %num_third %num_fourth",
        -(2**31),
        INT32_MAX,
        "bits of scores may wrap",
        "bound choose",
    ),
    Limits(
        "%at %begin %most_ties %middle %num_middle %slot %taken %ties %ties_before %total %written",
        -1,
        MOST_TOKENS,
        "counts of a line's units are at most its units",
        "choose",
    ),
)


def _ranges_of(table: tuple[Limits, ...]) -> dict[str, tuple[int, int]]:
    return {name: limits for each in table for name, limits in each.ranges().items()}


_WHYS = {name: each.why for each in CONDITIONS for name in each.ranges()}
_PLAIN, _ALL = _ranges_of(LIMITS), _ranges_of((*LIMITS, *CONDITIONS))


@cache
def faults_of(ttir: str) -> tuple[str, ...]:
    """The faults of a kernel under all conditions."""
    return prove_no_overflow(ttir, _ALL).faults


def conditions_of(ttir: str) -> tuple[str, ...]:
    """The conditions without which a kernel that has no faults under all of them is not proved."""
    if not prove_no_overflow(ttir, _PLAIN).faults:
        return ()
    return tuple(dict.fromkeys(_WHYS[name] for name in needed_ranges(ttir, _ALL, among=_WHYS)))
