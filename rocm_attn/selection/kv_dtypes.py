"""What a name of --kv-dtype means on a target."""

from __future__ import annotations

from rocm_attn.errors import BadSetting
from rocm_attn.machine.choices import AUTO, KV_DTYPES
from rocm_attn.machine.target import Target
from rocm_attn.problem import KVEncoding

_BY_NAME = {
    AUTO: KVEncoding.LIKE_Q,
    "fp8_e4m3fn": KVEncoding.E4M3FN,
    "fp8_e4m3fnuz": KVEncoding.E4M3FNUZ,
    "fp8_e5m2": KVEncoding.E5M2,
}


def kv_encoding_named(name: str, target: Target) -> KVEncoding:
    """The encoding of K and V under one of KV_DTYPES: "fp8" is what the target's matrix units read. Raises BadSetting.

    auto: as q
    fp8:  e4m3fnuz on gfx942, e4m3fn elsewhere
    """
    if name == "fp8":
        return (
            KVEncoding.E4M3FN if target.fp8_dtype is None else KVEncoding(str(target.fp8_dtype).removeprefix("torch."))
        )
    if name not in _BY_NAME:
        raise BadSetting(f"kv_dtype {name!r} is not known; choose one of {', '.join(KV_DTYPES)}")
    return _BY_NAME[name]
