"""The attention of DeepSeek-V4 and V4.1, from their config.json.

A token has one row, K and V of one head. Each layer attends to a window of such rows with sinks; most attend to
compressed rows too, with the same softmax.
"""

from dataclasses import replace

from rocm_attn.errors import BadModel, Unsupported
from rocm_attn.models.fields import MAX_LAYERS, Fields, shown
from rocm_attn.models.geometry import EVERY_ROW, AttentionGeometry, AttentionLayer, CompressedRows, window_left

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def compressed_layers(fields: Fields) -> AttentionGeometry:
    """A window, and compressed rows of some tokens each. Raises BadModel, Unsupported.

    V4's layers make their own: rows of 4 tokens that overlap, of which an indexer chooses, or of 128, which are all
    read. A row exists once its last token does, and that token sees it (transformers 5.24.0: DeepseekV4CSACompressor,
    DeepseekV4HCACompressor; vLLM: get_compressed_slot_mapping). In V4.1 the layers of kv_source_layer_ids make rows,
    those of index_source_layer_ids choose, and other layers use what the nearest earlier one did. Its rows do not
    overlap, and index keys are projections of rows. Layers that choose after candidate_source_layer_id do so among the
    blocks of rows that it leaves: candidate_topk_blocks with the largest scores of single rows, the last one that a
    token sees among them (NVIDIA-NeMo/Automodel: deepseek_v41/attention.py, _select_candidate_blocks).
    """
    dim, heads = fields.count("head_dim"), fields.count("num_attention_heads")
    before = window_left(fields.count("sliding_window"))
    plain = AttentionLayer(heads, 1, dim, scale=dim**-0.5, window_left=before, has_sinks=True, latent_dim=dim)
    indexer = fields.count("index_topk"), fields.count("index_n_heads"), fields.count("index_head_dim")
    makers, choosers = fields.ids("kv_source_layer_ids"), fields.ids("index_source_layer_ids")
    candidate_source = fields.whole("candidate_source_layer_id", -1)
    left = fields.count("candidate_topk_blocks", 1), fields.count("candidate_block_size", 1)
    compressions, layers = _compressions(fields), []
    if candidate_source >= 0:
        is_one = candidate_source < len(compressions) and compressions[candidate_source][0] == 1
        if candidate_source != max(makers, default=-1) or candidate_source not in choosers or not is_one:
            raise Unsupported(
                f"candidate_source_layer_id {candidate_source} is not served: it must be the last of "
                f"kv_source_layer_ids {shown(makers)}, among index_source_layer_ids {shown(choosers)}, and its rows "
                "must stand for one token each"
            )
    for number, (tokens, is_chosen) in enumerate(compressions):
        if tokens and any(ids and min(ids) > number for ids in (makers, choosers)):
            raise BadModel(
                f"config.json: layer {number} has compressed rows, and the first of kv_source_layer_ids or "
                "index_source_layer_ids comes after it"
            )
        own_rows, own_choice = not makers or number in makers, not choosers or number in choosers
        top = indexer if is_chosen else (EVERY_ROW, 0, 0)
        is_v4 = is_chosen and not makers
        blocks = left if 0 <= candidate_source <= number else (0, 1)
        rows = CompressedRows(tokens, dim, *top, own_rows, own_choice, is_v4, is_v4, *blocks)
        layers.append(replace(plain, compressed=(rows,)) if tokens else plain)
    return AttentionGeometry.of(layers)


def _compressions(fields: Fields) -> list[tuple[int, bool]]:
    """[layers] Tokens of a compressed row, 0 if there are none, and whether an indexer chooses. Raises BadModel."""
    rates, num_layers = fields.inner("compress_rates"), fields.count("num_hidden_layers", most=MAX_LAYERS)
    sparse, heavy = rates.count(_SPARSE, 4), rates.count(_HEAVY, 128)
    if fields.has("layer_types"):
        kinds = {"sliding_attention": (0, False), _SPARSE: (sparse, True), _HEAVY: (heavy, False)}
        return [kinds[each] for each in fields.layer_types(num_layers, kinds)]
    # Published files have more ratios, for draft layers.
    is_shared = fields.has("kv_source_layer_ids")
    ratios = fields.ids("compress_ratios")[:num_layers]
    if not is_shared and not set(ratios) <= {0, sparse, heavy}:
        raise Unsupported(f"compress_ratios {shown(ratios)} are not served; they may be 0, {sparse} and {heavy}")
    if len(ratios) != num_layers:
        raise BadModel(f"config.json: kinds of {len(ratios)} layers for num_hidden_layers {num_layers}")
    return [(ratio, is_shared or ratio == sparse) for ratio in ratios]
