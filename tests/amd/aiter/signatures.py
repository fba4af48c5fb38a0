"""The signatures of AITER's functions in two releases: the ledger's parameters, with the values of their defaults."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rocm_lab.ledger.sources import functions, recorded


@dataclass(frozen=True, slots=True)
class Release:
    """One release. parameters: of each function, as the ledger has them: "name=" has a default"""

    version: str
    parameters: Mapping[str, str]

    def is_before(self, *numbers: int) -> bool:
        """True if it was made before the release of these three numbers."""
        return tuple(int(part) for part in self.version.split(".")[:3]) < numbers

    def signature(self, name: str) -> inspect.Signature:
        """Returns the function's signature."""
        return inspect.Signature([_parameter(name, text) for text in self.parameters[name].split()])


def _parameter(function: str, text: str) -> inspect.Parameter:
    name, equals, _ = text.partition("=")
    value = _OWN_DEFAULTS.get((function, name), _DEFAULTS.get(name)) if equals else inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value)


# Defaults other than None, as read in ROCm/aiter, which most functions with such a parameter have.
_DEFAULTS: Mapping[str, object] = {
    **dict.fromkeys(("causal", "deterministic", "return_lse", "return_attn_probs", "return_logits"), False),
    **dict.fromkeys(("shuffled_kv_cache", "skip_reduce", "intra_batch_mode", "is_cp_round_robin"), False),
    **dict.fromkeys(("fast_mode", "ps"), True),
    **dict.fromkeys(("dropout_p", "logits_soft_cap", "logit_cap"), 0.0),
    **dict.fromkeys(("sink_size", "min_seqlen_q", "mla_version", "cp_rank", "sliding_window"), 0),
    **dict.fromkeys(("mtp", "how_v3_bf16_cvt", "page_size", "nhead_kv", "cp_world_size"), 1),
    **dict.fromkeys(("max_seqlen_qo", "uni_seqlen_qo", "topk", "max_split_per_batch"), -1),
    **dict.fromkeys(("partition_size", "context_partition_size"), 256),
    "kv_granularity": 16,
    "compute_type": torch.bfloat16,
    "window_size": (-1, -1),
}
_OWN_DEFAULTS: Mapping[tuple[str, str], object] = {
    ("flash_attn_varlen_func", "window_size"): (-1, -1, 0),
    ("mla_decode_fwd", "causal"): True,
}


def _release(version: str, name: str) -> Release:
    """name: of the release in the ledger"""
    sources = recorded()
    return Release(version, {each.name: sources.at(each.name, name).parameters for each in functions()})


V0_1_15 = _release("0.1.15", "v0.1.15")
E4048607 = _release("0.1.21.dev46+ge4048607a", "0.1.21.dev46")
RELEASES = (V0_1_15, E4048607)
