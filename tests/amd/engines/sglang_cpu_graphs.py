"""SGLang's own runner of graphs on a CPU: it pads batches, fills static tensors and calls backends as on a GPU.

A graph is the call that SGLang captures, which each replay makes again. Names are those of SGLang 0.5.23
(sglang/srt/model_executor/runner).
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

# Sequences of graphs.
SIZES = (2, 5, 16)


def run_graphs_on_a_cpu() -> None:
    """Gives decodes, and steps that verify drafts, graphs. A draft model has none."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.runtime_context import get_exec

    make = cuda_graph_setup.capture_decode_graph

    def captured(*, model_runner: Any) -> Any:
        if model_runner.is_draft_worker:
            return make(model_runner=model_runner)
        decode = get_exec().graph.cuda_graph_config.decode
        decode.bs, decode.backend = list(SIZES), "full"
        model_runner.graph_shared_output = GraphSharedOutput.create_for_model_runner(model_runner)
        runner = DecodeCudaGraphRunner(model_runner)
        return cuda_graph_setup.GraphCapture(runner=runner, memory_phase="decode", memory_usage_gb=0, capture_time=0)

    cuda_graph_setup.capture_decode_graph = captured
    decode_cuda_graph_runner.resolve_decode_backend = lambda _: Calls()
    decode_cuda_graph_runner.graph_capture = lambda stream: nullcontext(SimpleNamespace(stream=stream))
    decode_cuda_graph_runner.get_or_create_global_graph_capture_stream = lambda: None
    # Marks for the streams of a GPU.
    DecodeCudaGraphRunner._record_in_graph_metadata_prep_done = lambda _: None
    DecodeCudaGraphRunner._resolve_shared_read_ends = lambda *_: SharedReadEnds.UNKNOWN
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph


class Calls:
    """A backend of SGLang's runner of graphs, which calls again what was captured."""

    def __init__(self) -> None:
        self._calls = dict[Any, Any]()

    @contextmanager
    def capture_session(self, stream: Any) -> Any:
        yield

    def capture_one(self, key: Any, forward: Any, **_: Any) -> None:
        forward()
        self._calls[key] = forward

    def replay_session(self) -> Any:
        return nullcontext()

    def replay(self, key: Any, batch: Any, **_: Any) -> Any:
        return self._calls[key]()
