"""The time of a decode step on 1, 2 and 4 tensor-parallel ranks, and of its parts.

python -m rocm_lab.benchmarks.tensor_parallel --out rocm_lab/benchmarks/results/tensor_parallel_h200.json

A rank is a process with its own GPU; the model has Llama-3.1-8B's sizes and random weights. Measured are the graphed
step, and each of its parts alone in a separate graph: the matrix products over every layer's weights, attention over
every layer's pages with the fill before it, and NCCL's sums. The remainder is the rest: norms, rotations, gates,
residuals, the embedding. Exits with 1, after writing the file, if the rest takes more than 40 us per layer. The tokens
of ranks are compared in tests/amd/text/test_ranks_on_gpus.py.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.models.config import AttentionConfig, LayerConfig, ModelConfig
from rocm_attn.models.gates import SwiGLU
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.mlp_config import DenseMlp
from rocm_attn.models.rope import Rope
from rocm_attn.models.tensors import Shape
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from rocm_lab.bench.clocks import microseconds_of
from rocm_lab.benchmarks.script import Row, parser_of, printed, write
from rocm_serve.models.attention_weights import KVHeadWeights
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.mlp_weights import DenseWeights
from rocm_serve.models.model import Model
from rocm_serve.models.weights import LayerWeights, ModelWeights, expected_shapes, load_weights
from rocm_serve.ranks import ONE_RANK, Ranks, RanksOfGroup

PAGE_SIZE = 16
DECODES = ((1, 1024), (8, 1024), (64, 1024), (256, 1024))  # sequences, tokens of each
ALLOWED_REST_US = 40.0  # per layer
NUM_RANKS = (1, 2, 4)  # those beyond the GPUs are left out
ROUNDS, STEPS = 7, 10  # medians of rounds of STEPS steps in a row
ROWS = "rows.json"


def model_of(
    heads: tuple[int, int, int], hidden: int, inner: int, vocab: int, num_layers: int, context: int
) -> ModelConfig:
    """A Llama. heads: query heads, KV heads, head_dim"""
    num_q_heads, num_kv_heads, head_dim = heads
    attention = AttentionLayer(num_q_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)
    mixer = AttentionConfig(attention, Rope(theta=500000.0, head_dim=head_dim))
    layer = LayerConfig((mixer,), DenseMlp(inner, SwiGLU()))
    return ModelConfig(
        architecture="LlamaForCausalLM",
        layers=(layer,) * num_layers,
        hidden_size=hidden,
        vocab_size=vocab,
        context_len=context,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
        eos_token_ids=(),
    )


LLAMA_8B = model_of((32, 8, 128), 4096, 14336, 128256, 32, 4096)


class RandomOnDevice:
    """A TensorSource whose tensors depend on their names, in values that bfloat16 represents."""

    name = "random tensors"

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._shapes, self._device = expected_shapes(config), device

    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def read(self, name: str, *where: slice) -> Tensor:
        shape = self._shapes[name]
        if "norm" in name:
            return torch.ones(shape, device=self._device)[where]
        random = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        # Products keep the size of their inputs, and the embedding has size one.
        size = 1.0 if "embed" in name else shape[-1] ** -0.5
        values = torch.randn(shape, generator=random, device=self._device, dtype=torch.float32)
        return (values * size).to(torch.bfloat16)[where]


def random_model(config: ModelConfig, source: type[RandomOnDevice] = RandomOnDevice) -> LoadedModel:
    """Returns the model on the GPU, in bfloat16, with a source's tensors."""
    device = torch.device("cuda")
    weights = load_weights(source(config, device), config, dtype=torch.bfloat16, device=device)
    return LoadedModel(config, weights, None, ONE_RANK)


class Served:
    """A model over a runtime with pages for num_seqs requests of `most` tokens, with a graph of num_seqs decoding."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ranks: Ranks, *, num_seqs: int, most: int) -> None:
        self.config = config.on_one_of(ranks.shard.num_ranks)
        self.runtime = build_runtime(
            self.config.attention.problems(dtype=weights.dtype, page_size=PAGE_SIZE),
            RuntimeOptions(
                num_pages=1 + num_seqs * -(-most // PAGE_SIZE),
                max_num_seqs=num_seqs,
                max_kv_len=most,
                capture_sizes=[num_seqs],
            ),
            device=weights.device,
            agree=ranks.agree,
        )
        self.model = Model(self.config, weights, self.runtime.head_weights, max_kv_len=most, ranks=ranks)
        self.runner = self.captured(self.model.forward)
        self.rows = np.empty(0, np.int32)

    def captured(self, forward: Callable[[Part], Tensor]) -> StepRunner[Tensor]:
        """Returns a runner with its graph, which is checked on pages that no request has yet."""
        runner = StepRunner(self.runtime, forward, recorder_for(self.runtime.device))
        report = runner.capture_all()
        if report.graphs_off or report.skipped:
            raise RuntimeError("; ".join(report.lines()))
        return runner

    def admit(self) -> None:
        """Admits as many requests as there is room for."""
        self.rows = np.array([self.runtime.table.admit() for _ in range(self.runtime.table.num_free_rows)], np.int32)

    def filled_step(self, kv_len: int) -> StepBatch:
        """Returns a decode step over random K and V."""
        for layer in range(self.config.num_layers):
            pages = self.runtime.pool.layer(layer)
            pages.k[1:].normal_()
            pages.v[1:].normal_()
        lengths = np.full(len(self.rows), kv_len, np.int32)
        self.runtime.table.reserve_all(self.rows, lengths)
        self.runtime.table.mark_stored(self.rows, lengths)
        ids = 1 + np.arange(len(self.rows), dtype=np.int32)
        return StepBatch(self.rows, lengths, np.ones(len(self.rows), np.int32), ids)


@dataclass(frozen=True, slots=True)
class RunTimer:
    """Times runs on a device."""

    device: torch.device
    meet: Callable[[], object]

    def us(self, run: Callable[[], object]) -> float:
        """Returns microseconds of one run: the median of rounds of STEPS runs, which all ranks begin together."""
        for _ in range(3):
            run()
        rounds = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize(self.device)
            self.meet()
            rounds.append(microseconds_of(run, STEPS))
        return float(statistics.median(rounds))


def decode_row(served: Served, ranks: Ranks, clock: RunTimer, num_seqs: int, kv_len: int) -> Row:
    """Returns microseconds of a decode step and of its parts."""
    attention = served.captured(attention_alone(served, num_seqs))
    served.admit()
    batch, weights, num_layers = served.filled_step(kv_len), served.model.weights, served.config.num_layers
    step_us = clock.us(lambda: served.runner.run(batch))
    parts = {
        "attention_us": clock.us(lambda: attention.run(batch)),
        "gemm_us": clock.us(_graph(products(weights, num_seqs), weights.device)),
        "all_reduce_us": clock.us(_graph(sums(served, ranks, num_seqs), weights.device)),
        "all_gather_us": clock.us(_graph(gather(weights, ranks, num_seqs), weights.device)),
    }
    if served.runner.counters.replays < ROUNDS * STEPS or attention.counters.replays < ROUNDS * STEPS:
        raise RuntimeError(f"steps of {num_seqs} sequences were not replayed")
    return {
        "num_seqs": num_seqs,
        "kv_len": kv_len,
        "step_us": round(step_us, 1),
        **{name: round(value, 1) for name, value in parts.items()},
        "one_all_reduce_us": round(parts["all_reduce_us"] / (2 * num_layers), 2),
        "rest_us_a_layer": round((step_us - sum(parts.values())) / num_layers, 2),
    }


def _graph(body: Callable[[], Tensor], device: torch.device) -> Callable[[], object]:
    recording, _ = recorder_for(device).record(body)
    return recording.replay


def attention_alone(served: Served, num_seqs: int) -> Callable[[Part], Tensor]:
    """Returns a forward of attention alone, with constant q, k and v."""
    heads = served.config.attending[0].attention
    parts = [heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads]
    device, dtype = served.runtime.device, served.model.weights.dtype
    qkv = torch.randn(num_seqs, sum(parts), heads.head_dim, device=device, dtype=dtype)

    def forward(step: Part) -> Tensor:
        q, k, v = torch.split(qkv, parts, 1)
        out = torch.empty_like(q)
        for layer in range(served.config.num_layers):
            step.layers.store_and_attend(layer, q, k, v, out)
        return out

    return forward


def products(weights: ModelWeights, num_seqs: int) -> Callable[[], Tensor]:
    """The matrix products of a step."""
    device, dtype = weights.device, weights.dtype
    matrices = [_matrices(layer) for layer in weights.layers]
    inputs = [torch.randn(num_seqs, matrix.shape[1], device=device, dtype=dtype) for matrix in matrices[0]]
    hidden = torch.randn(num_seqs, weights.embedding.shape[1], device=device, dtype=dtype)

    def body() -> Tensor:
        for of_layer in matrices:
            for x, matrix in zip(inputs, of_layer, strict=True):
                F.linear(x, matrix)
        return F.linear(hidden, weights.head)

    return body


def _matrices(layer: LayerWeights) -> tuple[Tensor, ...]:
    """The matrices of a layer with heads and a dense MLP."""
    (attention,), mlp = layer.mixers, layer.mlp
    assert isinstance(attention, KVHeadWeights)
    assert isinstance(mlp, DenseWeights)
    return attention.qkv, attention.out, mlp.gate_up, mlp.down


def sums(served: Served, ranks: Ranks, num_seqs: int) -> Callable[[], Tensor]:
    """The sums over ranks of a step, and nothing between them."""
    weights = served.model.weights
    x = torch.zeros(num_seqs, served.config.hidden_size, device=weights.device, dtype=weights.dtype)

    def body() -> Tensor:
        for _ in range(2 * served.config.num_layers):
            ranks.sum(x)
        return x + 0

    return body


def gather(weights: ModelWeights, ranks: Ranks, num_seqs: int) -> Callable[[], Tensor]:
    """The gathering of a step's logits."""
    own = torch.zeros(num_seqs, weights.head.shape[0], device=weights.device, dtype=weights.dtype)
    return lambda: ranks.gathered(own) + 0


def on_rank(rank: int, num_ranks: int, folder: Path) -> None:
    """Measures on one of num_ranks ranks. The first rank writes the rows."""
    device = torch.device("cuda", rank)
    ranks, meet = _joined(rank, num_ranks, folder, device)
    weights = load_weights(
        RandomOnDevice(LLAMA_8B, device), LLAMA_8B, dtype=torch.bfloat16, device=device, shard=ranks.shard
    )
    rows = []
    for num_seqs, kv_len in DECODES:
        give_memory_back()
        served = Served(LLAMA_8B, weights, ranks, num_seqs=num_seqs, most=kv_len)
        rows.append({"ranks": num_ranks, **decode_row(served, ranks, RunTimer(device, meet), num_seqs, kv_len)})
        del served
    if rank == 0:
        (folder / ROWS).write_text(json.dumps(rows))
    meet()
    os._exit(0)  # NCCL would wait for graphs that hold its sums


def give_memory_back() -> None:
    """Frees the memory of previous models, whose graphs and functions refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()


def _joined(rank: int, num_ranks: int, folder: Path, device: torch.device) -> tuple[Ranks, Callable[[], object]]:
    torch.cuda.set_device(device)
    if num_ranks == 1:
        return ONE_RANK, lambda: None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl", init_method=f"file://{folder / 'ranks'}", rank=rank, world_size=num_ranks)
    assert dist.group.WORLD is not None
    ranks = RanksOfGroup(dist.group.WORLD)
    return ranks, lambda: ranks.least(0)


def of_ranks(num_ranks: int) -> list[Row]:
    """Returns the rows of the first rank. Raises the error of a rank that fails; the others are ended then."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(on_rank, (num_ranks, Path(folder)), nprocs=num_ranks)  # type: ignore[no-untyped-call]
        rows: list[Row] = json.loads((Path(folder) / ROWS).read_text())
    return rows


def main() -> None:
    args = parser_of(__doc__).parse_args()
    on_gpus = [num_ranks for num_ranks in NUM_RANKS if num_ranks <= torch.cuda.device_count()]
    rows = printed(row for num_ranks in on_gpus for row in of_ranks(num_ranks))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    write(args.out, of_machine={"nccl": nccl}, allowed_rest_us=ALLOWED_REST_US, rows=rows)
    sys.exit(any(row["rest_us_a_layer"] > ALLOWED_REST_US for row in rows))


if __name__ == "__main__":
    main()
