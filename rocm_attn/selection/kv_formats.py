"""KVFormat: the encoding of K and V, by the names of --kv-dtype and --kv-scales."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_attn.errors import BadSetting
from rocm_attn.machine.choices import AUTO, KV_DTYPES, KV_SCALES
from rocm_attn.machine.target import Target
from rocm_attn.problem import KVEncoding, Scales

_ENCODINGS = {
    AUTO: KVEncoding.LIKE_Q,
    "fp8_e4m3fn": KVEncoding.E4M3FN,
    "fp8_e4m3fnuz": KVEncoding.E4M3FNUZ,
    "fp8_e5m2": KVEncoding.E5M2,
}
_SCALES = {
    "layer": Scales.LAYER,
    "head": Scales.HEAD,
    "token": Scales.TOKEN,
    "group": Scales.GROUP,
    "footer": Scales.FOOTER,
}
_E4M3 = (KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The encoding of K and V, and what shares a scale of them; see Problem."""

    encoding: KVEncoding = KVEncoding.LIKE_Q
    scales: Scales = Scales.NONE

    @classmethod
    def named(cls, kv_dtype: str, kv_scales: str, target: Target, *, has_scales: bool = False) -> KVFormat:
        """The format under one of KV_DTYPES and one of KV_SCALES. Raises BadSetting.

        has_scales: True if the model brings scales of its layers, which were found for E4M3
        """
        encoding = _encoding(kv_dtype, target)
        if kv_scales not in KV_SCALES:
            raise BadSetting(f"kv_scales {kv_scales!r} is not known; choose one of {', '.join(KV_SCALES)}")
        if encoding is KVEncoding.LIKE_Q:
            if kv_scales != AUTO:
                raise BadSetting(
                    f"kv_scales is {kv_scales} and kv_dtype {kv_dtype}; only eight-bit K and V have scales: "
                    f"choose kv_dtype fp8, or kv_scales {AUTO}"
                )
            return cls()
        if kv_scales == AUTO:
            return cls(encoding, Scales.LAYER if has_scales and encoding in _E4M3 else Scales.TOKEN)
        return cls(encoding, _SCALES[kv_scales])


AS_COMPUTED = KVFormat()


def _encoding(kv_dtype: str, target: Target) -> KVEncoding:
    if kv_dtype == "fp8":
        dtype = target.fp8_dtype
        return KVEncoding.E4M3FN if dtype is None else KVEncoding(str(dtype).removeprefix("torch."))
    if kv_dtype not in _ENCODINGS:
        raise BadSetting(f"kv_dtype {kv_dtype!r} is not known; choose one of {', '.join(KV_DTYPES)}")
    return _ENCODINGS[kv_dtype]
