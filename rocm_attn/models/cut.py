"""The cost of dividing a model over ranks, in sentences: zeros in the place of heads, and copies of KV heads."""

from rocm_attn.models.config import ModelConfig
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.shards import Shard


def cost_of_heads(geometry: AttentionGeometry, num_ranks: int) -> tuple[str, ...]:
    """A sentence for each kind of layer whose heads do not divide evenly over ranks; none with one rank."""
    sentences = []
    for layer in geometry.layers:
        part = layer.on_one_of(num_ranks)
        q_heads, kv_heads = part.num_q_heads * num_ranks, part.num_kv_heads * num_ranks
        what = f"{layer.num_q_heads} query heads over {layer.num_kv_heads} KV heads"
        if q_heads > layer.num_q_heads:
            sentences.append(f"{what} are padded to {q_heads} over {kv_heads}, {_zeros(layer.num_q_heads, q_heads)}")
        elif kv_heads > layer.num_kv_heads:
            sentences.append(f"{what}: each KV head is held by {kv_heads // layer.num_kv_heads} ranks")
    for _, state in geometry.recurrent:
        heads, padded = state.num_value_heads, state.on_one_of(num_ranks).num_value_heads * num_ranks
        if padded > heads:
            sentences.append(f"{heads} heads with states are padded to {padded}, {_zeros(heads, padded)}")
    return tuple(dict.fromkeys(sentences))


def cost_of_cut(config: ModelConfig, num_ranks: int) -> tuple[str, ...]:
    """Returns the sentences of cost_of_heads, and one for each size of MLP or vocabulary that does not divide."""
    sentences = list(cost_of_heads(config.attention, num_ranks))
    sizes = [("an MLP of {} elements", size) for layer in config.layers for size in layer.mlp.sizes]
    for what, size in (*sizes, ("the output matrix of {} tokens", config.vocab_size)):
        padded = Shard(0, num_ranks).span(size).size * num_ranks
        if padded > size:
            sentences.append(f"{what.format(size)} is padded to {padded}, {_zeros(size, padded)}")
    return tuple(dict.fromkeys(sentences))


def _zeros(num_real: int, num_padded: int) -> str:
    return f"{1 - num_real / num_padded:.0%} of them zeros"
