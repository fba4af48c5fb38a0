"""The scales of eight-bit K and V in a model's file; its author chose them for E4M3FN."""

from rocm_attn.errors import BadModel
from rocm_attn.models.tensors import TensorSource

# Names within a layer's attention, by the tools that write them: a scale of K and one of V, or one for both.
_PAIRS = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale", "kv_scale"))
KV_SCALES = tuple(f".self_attn.{name}" for name in dict.fromkeys(name for pair in _PAIRS for name in pair))


def kv_scale_values(source: TensorSource, prefix: str) -> tuple[float, float] | None:
    """The scales of K and V of the layer whose attention's names start with prefix; None if it has none.

    Raises BadModel for one scale without the other, and for a value that is not a positive number.
    """
    shapes = source.shapes()
    for names in _PAIRS:
        there = [prefix + name in shapes for name in names]
        if all(there):
            k, v = (_scale(source, prefix + name) for name in names)
            return k, v
        if any(there):
            both = " and ".join(prefix + name for name in names)
            raise BadModel(f"{source.name} has one of {both}; it must have both or none")
    return None


def _scale(source: TensorSource, name: str) -> float:
    tensor = source.read(name)
    scale_value = float(tensor) if tensor.numel() == 1 else 0.0
    if not 0 < scale_value < float("inf"):
        raise BadModel(f"{source.name}: {name} is {tensor.tolist()}; it must be one positive number")
    return scale_value
