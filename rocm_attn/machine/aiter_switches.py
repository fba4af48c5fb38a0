"""AITER's environment variables that decide which of its kernels runs for a call of rocm_attn.

A probe's verdict holds for the switches under which it ran. A kernel that a switch makes wrong is refused
(providers/aiter/faults.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switch:
    """A variable.

    since:   the first release that reads it, of those that are served
    changes: a clause: what it changes
    verdict: a clause: what rocm_attn does about it
    """

    name: str
    since: str
    changes: str
    verdict: str


EXPERIMENTAL = "AITER_ENABLE_EXPERIMENTAL"
NO_OPUS = "AITER_DISABLE_FMHA_OPUS"

_PROBED = "the probe runs the kernel that it selects"

# Lines are of v0.1.20, unless another tag is named.
SWITCHES = (
    # aiter/mla.py:863 and 911: hk_mla_decode_fwd is called without q_scale and kv_scale.
    Switch(
        EXPERIMENTAL,
        "v0.1.15",
        "decodes 64 or 128 heads over latent pages in eight bits, and verifies four tokens of 16 heads, by kernels "
        "that ignore the scales",
        "mla_decode_fwd is refused for them",
    ),
    # csrc/cpp_itfs/pa/pa_ragged.py:30: EXPERIMENTAL compiles another kernel, with offsets of 32 bits.
    Switch("QKV_VERSION", "v0.1.15", "selects another kernel of paged_attention_ragged", _PROBED),
    # aiter/mla.py:879, on gfx950.
    Switch("AITER_MLA_USE_OPUS", "v0.1.20", "decodes latent pages in eight bits by another kernel on gfx950", _PROBED),
    # aiter/mla.py:97, for 16 heads.
    Switch("AITER_MLA_REDUCE_FLYDSL", "v0.1.20", "adds up the shares of latent decode in another kernel", _PROBED),
    # csrc/kernels/mla/metadata/v1_2_device.cuh:715; it is on by default.
    Switch(
        "AITER_MLA_META_USE_PARALLEL", "v0.1.17", "computes the schedule of latent decode in another kernel", _PROBED
    ),
    # aiter/mla.py:392, on gfx950: bfloat16, 16 heads, one new token.
    Switch(
        "AITER_MLA_DECODE_PERSISTENT_MAX_BATCH",
        "v0.1.18",
        "limits the sequences of a step whose latent decode follows a schedule on gfx950",
        _PROBED,
    ),
    # aiter/ops/mha.py:1945: calls of flash_attn_func alone.
    Switch("AITER_ENABLE_FMHA_OPUS", "v0.1.18", "changes dense attention", "rocm_attn does not call that"),
    # aiter/ops/mha.py:2901, on gfx950: bfloat16, head_dim/v_head_dim 192/128, without a log-sum-exp.
    Switch(NO_OPUS, "v0.1.18", "serves prefills of head_dim/v_head_dim 192/128 by another kernel on gfx950", _PROBED),
    # After v0.1.20 (aiter/ops/triton/attention/unified_attention.py).
    Switch("AITER_UNIFIED_ATTENTION_BACKEND", "v0.1.21", "selects another kernel of unified_attention", _PROBED),
)


def switches_set(environment: Mapping[str, str]) -> tuple[str, ...]:
    """NAME=VALUE of the switches that are set."""
    return tuple(f"{each.name}={environment[each.name]}" for each in SWITCHES if each.name in environment)
