"""PageTier: where evicted pages of the prefix cache go, and are loaded back from: host memory, or nowhere."""

from collections.abc import Sequence

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.errors import NeverFits
from rocm_attn.integrations.host_pages import HostPages
from rocm_attn.paging.host_memory import HostMemory
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.metrics import Metrics
from rocm_serve.models.loading import LoadedModel


class NoTier:
    """In place of HostPages: pages that are given back are lost."""

    def found(self, key: bytes) -> bool:
        return False

    def put(self, keys: Sequence[bytes], pages: Int32Array) -> None:
        """Nothing is kept."""

    def restore(self, keys: Sequence[bytes], pages: Int32Array) -> int:
        return 0

    def clear(self) -> None:
        """There is nothing to forget."""


NO_TIER = NoTier()
# Memory for pages next to a pool, by the keys of their tokens.
PageTier = HostPages | NoTier


def tier_for(loaded: LoadedModel, runtime: AttentionRuntime, num_bytes: int, metrics: Metrics) -> PageTier:
    """Host memory for an engine's pages. num_bytes: 0: none. Raises Unsupported, NeverFits."""
    if num_bytes == 0:
        return NO_TIER
    ranks, record_bytes = loaded.ranks, HostPages.record_bytes(runtime)
    num_records = ranks.least(num_bytes // record_bytes)  # else ranks would find other pages
    if num_records == 0:
        raise NeverFits(
            f"host_kv_bytes is {num_bytes}, and a page takes {record_bytes} bytes of host memory; raise it, or "
            "leave it out"
        )
    memory = HostMemory(num_records * record_bytes, record_bytes, pinned=runtime.device.type == "cuda")
    model = f"{loaded.config}, shard {ranks.shard}"
    return HostPages(runtime, memory, model=model, metrics=metrics, least=ranks.least)
