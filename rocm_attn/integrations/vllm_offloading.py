"""vLLM's OffloadingConnector over host memory whose blocks are checked when they come back (docs/vllm.md).

vLLM decides which blocks go to host memory, finds them again and runs the connector; HostBlocks moves them. A block
that has not come back as it left is refused: vLLM then computes its request again, or fails it, as
kv_load_failure_policy says, and the block is no longer found.

vLLM calls these interfaces experimental. So this module lies outside of the plug-in's folder, whose interfaces must be
unchanged in a release that serves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from rocm_attn.errors import Unsupported
from rocm_attn.guards.registry import guards_from_settings
from rocm_attn.integrations.host_blocks import HostBlocks, Moved, Transfer
from rocm_attn.integrations.plugins import VLLM

# vLLM's setting, from 0.33 on, for the bytes that requests may load within the step that they run in.
_LOADS_IN_STEP = "sync_load_budget_bytes"


class CheckedManager(CPUOffloadingManager):
    """vLLM's manager of chunks in host memory, which forgets those that were refused."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._key_of_chunk: dict[int, OffloadKey] = {}
        self._refused: set[OffloadKey] = set()

    def refuse(self, chunks: Collection[int]) -> None:
        """Lets no later request find these chunks. They stay until others need their place.

        Chunks of loads that began before reset_cache() no longer have a key.
        """
        self._refused.update(self._key_of_chunk[chunk] for chunk in chunks if chunk in self._key_of_chunk)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS if key in self._refused else super().lookup(key, req_context)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = super().prepare_load(keys, req_context)
        assert isinstance(spec, CPULoadStoreSpec)
        self._key_of_chunk.update(zip(spec.block_ids.tolist(), keys, strict=True))
        return spec

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        prepared = super().prepare_store(keys, req_context)
        if prepared is not None:
            self._refused.difference_update(prepared.evicted_keys)
        return prepared

    def reset_cache(self) -> None:
        super().reset_cache()
        self._key_of_chunk.clear()
        self._refused.clear()


class CheckedWorker(OffloadingWorker):
    """Moves blocks by HostBlocks, and remembers those that were refused.

    blocks_per_chunk: blocks that vLLM counts as one in host memory
    num_chunks:       that host memory has room for
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_chunks: int) -> None:
        caches = [each.tensor for each in kv_caches.tensors]
        groups = [
            [caches[ref.tensor_idx][:, : ref.page_size_bytes] for ref in refs] for refs in kv_caches.group_data_refs
        ]
        self._per_chunk = blocks_per_chunk
        self._blocks = HostBlocks(groups, num_chunks * blocks_per_chunk, guards_from_settings().host)
        self._running: dict[int, Transfer] = {}
        self.refused_chunks: set[int] = set()
        self.refused_jobs: set[int] = set()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._running[job_id] = self._blocks.send_out(self._moved(src_spec, dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._running[job_id] = self._blocks.bring_back(self._moved(dst_spec, src_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Returns the transfers that are done. vLLM asserts that none has failed, so refusals are kept aside."""
        done = {job_id: each for job_id, each in self._running.items() if each.is_done()}
        for job_id, each in done.items():
            del self._running[job_id]
            if refused := each.refused:
                self.refused_chunks.update(slot // self._per_chunk for slot in refused)
                self.refused_jobs.add(job_id)
                VLLM.log.error(
                    "%d blocks that came back from host memory do not hold the bytes that left; they are not used",
                    len(refused),
                )
        return [TransferResult(job_id, True, each.num_bytes, each.seconds) for job_id, each in done.items()]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._running.keys():
            self._running[job_id].wait()

    def shutdown(self) -> None:
        for transfer in self._running.values():
            transfer.wait()
        self._running.clear()

    def _moved(self, on_device: GPULoadStoreSpec, on_host: LoadStoreSpec) -> list[Moved]:
        """Returns the blocks of each group with their slots. A group may begin within its first chunk."""
        assert isinstance(on_host, CPULoadStoreSpec)
        blocks, chunks = on_device.block_ids.tolist(), on_host.block_ids.tolist()
        moved = []
        for group, (count, first) in enumerate(zip(on_device.group_sizes, on_device.block_indices, strict=True)):
            skipped = first % self._per_chunk
            places = range(skipped, skipped + count) if count else range(0)
            num_chunks = -(-places.stop // self._per_chunk) if count else 0
            of_group, chunks = chunks[:num_chunks], chunks[num_chunks:]
            slots = [of_group[at // self._per_chunk] * self._per_chunk + at % self._per_chunk for at in places]
            moved.append(Moved(group, blocks[:count], slots))
            blocks = blocks[count:]
        assert not blocks
        assert not chunks
        return moved


class CheckedSpec(CPUOffloadingSpec):
    """vLLM's settings of host memory, with our manager and worker."""

    _checked: CheckedManager | None = None

    def get_manager(self) -> OffloadingManager:
        if self._checked is None:
            self._checked = CheckedManager(
                num_chunks=self.num_chunks,
                cache_policy=self.eviction_policy,
                cache_policy_module_path=self.cache_policy_module_path,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                store_threshold=int(self.extra_config.get("store_threshold", 0)),
                max_tracker_size=int(self.extra_config.get("max_tracker_size", 64_000)),
            )
        return self._checked

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CheckedWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)

    def _uses_shared_region(self) -> bool:
        """Each rank has host memory of its own, because each keeps the checksums of its blocks."""
        return False


@dataclass
class CheckedWorkerMetadata(OffloadingWorkerMetadata):
    """The scheduler's news of transfers. refused_chunks: whose blocks were refused on a rank"""

    refused_chunks: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> CheckedWorkerMetadata:
        both = super().aggregate(other)
        assert isinstance(both, OffloadingWorkerMetadata)
        refused = self.refused_chunks | other.refused_chunks
        return CheckedWorkerMetadata(both.completed_jobs, both.transfer_stats, refused)


class CheckedOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, with a checksum of each block that leaves the device and comes back.

    Raises Unsupported for loads within the step that reads them: it would have begun before a block is refused.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        chosen = vllm_config.kv_transfer_config.kv_connector_extra_config
        if int(chosen.get(_LOADS_IN_STEP, 0)):
            raise Unsupported(
                f"{_LOADS_IN_STEP} is {chosen[_LOADS_IN_STEP]}: a step would read blocks that it has just loaded, "
                "before one that has changed is refused; leave it out of kv_connector_extra_config"
            )
        chosen |= {"spec_name": CheckedSpec.__name__, "spec_module_path": CheckedSpec.__module__}
        super().__init__(vllm_config, role, kv_cache_config)
        self._request_of_load: dict[int, str] = {}

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, OffloadingConnectorMetadata)
        self._request_of_load |= {job_id: job.req_id for job_id, job in metadata.load_jobs.items()}
        super().start_load_kv(forward_context, **named)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the transfers that have ended. Requests with a refused block are among the received ones, too."""
        results = super().get_transfer_results(finished_req_ids)
        worker = self._worker
        if worker is not None:
            results.failed_recving |= {self._request_of_load[job_id] for job_id in worker.refused_jobs}
            worker.refused_jobs.clear()
        received = results.finished_recving
        self._request_of_load = {
            job: request for job, request in self._request_of_load.items() if request not in received
        }
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        meta, worker = super().build_connector_worker_meta(), self._worker
        if meta is None or worker is None:
            return meta
        refused, worker.refused_chunks = worker.refused_chunks, set()
        return CheckedWorkerMetadata(meta.completed_jobs, meta.transfer_stats, refused)

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, CheckedWorkerMetadata) and meta.refused_chunks:
            manager = self.scheduler.manager
            assert isinstance(manager, CheckedManager)
            manager.refuse(meta.refused_chunks)
        super().update_connector_output(connector_output)

    @property
    def _worker(self) -> CheckedWorker | None:
        worker = None if self.connector_worker is None else self.connector_worker.worker
        assert worker is None or isinstance(worker, CheckedWorker)
        return worker
