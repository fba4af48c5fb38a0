"""The contestants for a step's layer: this package's providers, and other libraries' kernels if they are installed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rocm_attn.errors import BadSetting, Unsupported
from rocm_attn.machine.choices import PROVIDERS
from rocm_attn.machine.target import detect_target
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import select
from rocm_attn.selection.kernels import missing_kernels
from rocm_lab.bench.contestant import Contestant, LayerLaunch, NotServed
from rocm_lab.bench.peers.flash_attention import FlashAttention3
from rocm_lab.bench.peers.flashinfer import FlashInfer
from rocm_lab.bench.peers.torch_sdpa import TorchSdpa
from rocm_lab.bench.peers.vllm_triton import VllmTriton
from rocm_lab.bench.step_data import StepData

DETERMINISTIC = "+deterministic"


@dataclass(frozen=True, slots=True)
class OwnProvider:
    """A provider of this package's. provider: a name of PROVIDERS"""

    provider: str
    deterministic: bool = False

    def prepare(self, data: StepData) -> LayerLaunch:
        """Does the same as Contestant.prepare, with the row that serves the step."""
        target = detect_target(data.device)
        pool = PoolSize(data.pages.k.shape[0], data.bounds.max_kv_len, data.batch.num_seqs)
        try:
            selection = select(
                data.problem,
                target,
                self.provider,
                pool=pool,
                unavailable=missing_kernels(target, self.provider),
                deterministic=self.deterministic,
            )
        except Unsupported as refusal:
            raise NotServed("; ".join(refusal.reasons) or refusal.summary) from refusal
        kernel = selection.kernel(data.kind)
        row, bound = kernel.entry, kernel.bound
        what = f"{row.name}: {bound.describe()}"
        return LayerLaunch(data.layer(bound), lambda: data.out, what, row.rounds_products, row.rounds_queries)


def contestants(names: tuple[str, ...], fa3_library: str) -> Mapping[str, Contestant]:
    """Returns the contestants by name. fa3_library: a shared library of FlashAttention-3; empty: the installed one.

    Raises BadSetting for a name that is not known.
    """
    found: dict[str, Contestant] = {}
    for name in names:
        own, _, kind = name.partition("+")
        if own in PROVIDERS and f"+{kind}" in ("+", DETERMINISTIC):
            found[name] = OwnProvider(own, deterministic=bool(kind))
        elif name in _PEERS:
            found[name] = _PEERS[name](fa3_library)
        else:
            known = ", ".join((*PROVIDERS, *_PEERS))
            raise BadSetting(f"provider {name!r} is not known; choose among {known}, ours also with {DETERMINISTIC}")
    return found


_PEERS: Mapping[str, Callable[[str], Contestant]] = {
    "sdpa": lambda fa3_library: TorchSdpa(),
    "fa3": FlashAttention3,
    "flashinfer": lambda fa3_library: FlashInfer(),
    "vllm-triton": lambda fa3_library: VllmTriton(),
}
PEERS = tuple(_PEERS)
