"""RankedEngine: an Engine over tensor-parallel ranks, each in a process of its own."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

import torch

from rocm_attn.capture.graphs import CaptureReport, Progress
from rocm_attn.errors import BadRequest, BadSetting, NeverFits
from rocm_attn.machine.devices import memory_of
from rocm_attn.machine.settings import require_kind, whole_number
from rocm_attn.truth.verdict import TruthVerdict
from rocm_serve.options import EngineOptions
from rocm_serve.parallel.messages import ModelLoader, RankSetup, require_sendable
from rocm_serve.parallel.processes import RankProcesses
from rocm_serve.report import Report
from rocm_serve.request import Completion, Event, FinishReason, Request
from rocm_serve.serving import serve_all
from rocm_serve.speculation.methods import require_ranks

# A CPU with fewer cores may still try the ranks of a host with eight GPUs.
_MOST_ON_FEW_CORES = 8


class RankedEngine:
    """Serves requests like Engine, with tensor-parallel ranks.

    The caller's process holds no part of the model and uses no GPU: it commands the ranks and watches them. An error in
    a request, or a device fault, ends the same requests as in an Engine. If a rank dies, or raises an error that the
    others do not, all ranks are ended within seconds, RankFailed names it, and the engine is unusable. The ranks end
    with the caller's process, however that ends. Use it as a context manager, or call close().

    load:        loads a rank's part in its process: partial(load_model, path, dtype=...), or a module-level function.
                 Processes are spawned, so a script must keep its own work under `if __name__ == "__main__":`
    num_ranks:   processes on this host, one rank each
    device_type: "cuda" for one GPU each, the first ones available; "cpu"

    Raises what Engine raises, BadSetting for more ranks than GPUs, or than a CPU's cores and eight, or for a load that
    cannot be sent, and RankFailed.
    """

    def __init__(
        self, load: ModelLoader, options: EngineOptions | None = None, *, num_ranks: int, device_type: str = "cpu"
    ) -> None:
        num_ranks = whole_number("num_ranks", num_ranks, least=1)
        self.options = options if options is not None else EngineOptions()
        require_kind("options", self.options, EngineOptions, BadSetting)
        require_sendable("load", load)
        _check(num_ranks, device_type, self.options.host_kv_bytes)
        require_ranks(self.options.speculative, num_ranks)  # before the ranks read weights, which takes minutes
        self._processes = processes = RankProcesses()
        num_threads = max(1, torch.get_num_threads() // num_ranks)
        self.limits = processes.start(
            [
                RankSetup(rank, num_ranks, load, self.options, device_type, num_threads, processes.store)
                for rank in range(num_ranks)
            ]
        )
        self._end = weakref.finalize(self, processes.kill)

    def __enter__(self) -> RankedEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the ranks."""
        self._end.detach()
        self._processes.close()

    @property
    def has_work(self) -> bool:
        """Like Engine.has_work."""
        return self._processes.has_work

    def capture_all(self, progress: Progress) -> CaptureReport:
        """Like Engine.capture_all."""
        report: CaptureReport = self._processes.call("capture_all", on_progress=progress)
        return report

    def compile_all(self, progress: Progress) -> None:
        """Like Engine.compile_all, on every rank."""
        self._processes.call("compile_all", on_progress=progress)

    def check(self, request: Request) -> None:
        """Like Engine.check."""
        self.limits.check(request)

    def can_prepare(self, request: Request) -> bool:
        """Like Engine.can_prepare, on every rank."""
        require_kind("the request", request, Request, BadRequest)
        return self._do_all("can_prepare", request)

    def is_prepared(self, request: Request) -> bool:
        """Like Engine.is_prepared: True if no rank would wait and delay the others."""
        self.check(request)
        return self._do_all("is_prepared", request)

    def _do_all(self, method: str, request: Request) -> bool:
        """True if all ranks say so of a request's constraint. Its prompt is not sent: they are asked in every step."""
        if request.constraint is None:
            return True  # the ranks need not be asked
        return all(self._processes.call_all(method, replace(request, prompt_token_ids=request.prompt_token_ids[:1])))

    def prepare_constraints(self) -> None:
        """Like Engine.prepare_constraints."""
        self._processes.call("prepare_constraints")

    def submit(self, request: Request) -> int:
        """Like Engine.submit."""
        self.check(request)
        number: int = self._processes.call("submit", request)
        return number

    def abort(self, number: int, reason: FinishReason = "abort") -> None:
        """Like Engine.abort."""
        self._processes.call("abort", number, reason)

    def forget_prefixes(self) -> None:
        """Like Engine.forget_prefixes."""
        self._processes.call("forget_prefixes")

    def settle(self) -> None:
        """Like Engine.settle."""
        self._processes.call("settle")

    def cancel(self, number: int) -> None:
        """Like Engine.cancel. Does nothing if a rank has failed: then no request is left."""
        if self._processes.is_alive:
            self._processes.call("cancel", number)

    def step(self) -> list[Event]:
        """Like Engine.step."""
        events: list[Event] = self._processes.call("step")
        return events

    def probe_truth(self, seed: int) -> TruthVerdict:
        """Like Engine.probe_truth, on every rank."""
        verdict: TruthVerdict = self._processes.call("probe_truth", seed)
        return verdict

    def completion(self, number: int) -> Completion:
        """Like Engine.completion."""
        completion: Completion = self._processes.call("completion", number)
        return completion

    def generate(self, requests: Many[Request], on_event: Callable[[Event], None] | None = None) -> list[Completion]:
        """Like Engine.generate."""
        return serve_all(self, requests, on_event)

    def report(self) -> Report:
        """Like Engine.report, for rank 0."""
        report: Report = self._processes.call("report")
        return report


def _check(num_ranks: int, device_type: str, host_kv_bytes: int) -> None:
    if device_type not in ("cpu", "cuda"):
        raise BadSetting(f"device_type {device_type!r} is not served; use 'cpu' or 'cuda' (HIP devices are 'cuda')")
    if device_type == "cuda" and num_ranks > torch.cuda.device_count():
        raise BadSetting(
            f"{num_ranks} ranks need a GPU each, and torch sees {torch.cuda.device_count()}; use fewer ranks"
        )
    most = max(_MOST_ON_FEW_CORES, os.cpu_count() or 1)
    if device_type == "cpu" and num_ranks > most:
        raise BadSetting(f"{num_ranks} ranks need a process each, and this CPU serves at most {most}; use fewer ranks")
    wanted, has = num_ranks * host_kv_bytes, memory_of(torch.device("cpu"))
    if wanted > has:
        raise NeverFits(
            f"host_kv_bytes is {host_kv_bytes} and is taken by each of {num_ranks} ranks, {wanted} together; the "
            f"machine has {has}, so give each at most {has // num_ranks}"
        )
