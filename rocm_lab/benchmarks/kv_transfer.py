"""Times of moving a request's tokens from pages to a buffer and back: whole models, and one layer at a time.

    python -m rocm_lab.benchmarks.kv_transfer --out rocm_lab/benchmarks/results/kv_transfer_h200.json

"copy" is a copy of as many bytes on the same device, "torch" the time of torch's own indexing for it, layer by layer.
Times are medians of device time, in us; host time is the time for which an export occupies the host. Before a time is
taken, every token that came back is compared with the original. Exits with 1 if one differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from rocm_attn.integrations.kv_transfer import KVExporter, KVImporter
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_lab.bench.layers import NAMED
from rocm_lab.benchmarks.script import Row, parser_of, printed, write

CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16
ROUNDS = 15
LLAMA = NAMED["llama-8b"].problem(BF16, 16)
CODED = replace(LLAMA, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.TOKEN)
LATENT = Problem(128, 1, 576, BF16, 64, v_head_dim=512, scale=576**-0.5, pool=PoolKind.LATENT)
# Name, layers, their problem, tokens.
CASES = (
    ("llama 8b, 4k tokens", 32, LLAMA, 4096),
    ("llama 8b, 32k tokens", 32, LLAMA, 32768),
    ("llama 8b in eight bits, 32k tokens", 32, CODED, 32768),
    ("deepseek v3 latents, 32k tokens", 61, LATENT, 32768),
)


def main() -> None:
    """Measures, prints, and writes the result."""
    options = parser_of(__doc__).parse_args()
    cases = printed(measured(*case) for case in CASES)
    write(options.out, cases=cases)
    if not all(case["right"] for case in cases):
        raise SystemExit(1)


def measured(name: str, num_layers: int, problem: Problem, kv_len: int) -> Row:
    """Measures one case."""
    runtime = runtime_of(num_layers, problem, kv_len)
    exporter = KVExporter(runtime)
    importer = KVImporter(runtime, exporter.passport)
    row, other = two_rows(runtime, kv_len)
    runtime.table.mark_stored([row], [kv_len])
    pages, others = exporter.pages_of(row, kv_len), importer.pages_of(other, kv_len)
    extent = exporter.extent(pages, kv_len)
    buffer = torch.empty(exporter.num_bytes(extent), dtype=torch.uint8, device=CUDA)
    one = torch.empty(exporter.num_layer_bytes(extent, 0), dtype=torch.uint8, device=CUDA)
    exporter.export(pages, extent, buffer)
    importer.import_pages(others, extent, buffer)
    ids, to = (torch.tensor(each[Space.FULL], device=CUDA) for each in (pages, others))
    found = {
        "copy": device_us(lambda: torch.empty_like(buffer).copy_(buffer)),
        "export": device_us(lambda: exporter.export(pages, extent, buffer)),
        "import": device_us(lambda: importer.import_pages(others, extent, buffer)),
        "export of one layer": device_us(lambda: exporter.export_layer(0, pages, extent, one)),
        "torch export": device_us(lambda: by_torch(runtime, ids)),
        "host of an export": host_us(lambda: exporter.export(pages, extent, buffer)),
    }
    return {
        "name": name,
        "right": all(moved_right(runtime, layer, ids, to) for layer in range(num_layers)),
        "megabytes": len(buffer) / 1e6,
        "us": {what: round(us, 1) for what, us in found.items()},
        "terabytes_per_s_read_and_written": round(2 * len(buffer) / found["export"] / 1e6, 2),
    }


def runtime_of(num_layers: int, problem: Problem, kv_len: int) -> AttentionRuntime:
    """Returns a runtime with pages for two requests, of random content."""
    options = RuntimeOptions(num_pages=2 * kv_len // problem.page_size + 2, max_num_seqs=2, max_kv_len=kv_len)
    runtime = build_runtime([problem] * num_layers, options, device=CUDA)
    for layer in range(num_layers):
        for tensor in runtime.pool.layer(layer).tensors().values():
            if tensor.dtype == torch.uint8:
                tensor.random_(0, 120)
            else:
                tensor.uniform_(0.5, 1.5)
    return runtime


def two_rows(runtime: AttentionRuntime, kv_len: int) -> tuple[int, int]:
    """Returns two rows of kv_len tokens whose pages lie among each other."""
    table, page_size = runtime.table, runtime.table.page_size
    rows, lengths = [table.admit(), table.admit()], [0, 0]
    for at in (torch.randperm(2 * kv_len // page_size) % 2).tolist():
        lengths[at] += page_size
        table.reserve(rows[at], lengths[at])
    return rows[0], rows[1]


def moved_right(runtime: AttentionRuntime, layer: int, ids: Tensor, to: Tensor) -> bool:
    """True if the target's pages hold the same data as the source's."""
    tensors = runtime.pool.layer(layer).tensors().values()
    return all(torch.equal(tensor[ids], tensor[to]) for tensor in tensors if len(tensor) > len(ids))


def by_torch(runtime: AttentionRuntime, ids: Tensor) -> list[Tensor]:
    """Reads the same pages by torch's indexing."""
    layers = range(len(runtime.kinds.of_layer))
    sides = [pages for layer in layers for pages in runtime.pool.layer(layer).tensors().values()]
    return [side.index_select(0, ids) for side in sides if len(side) > len(ids)]


def device_us(call: Callable[[], object]) -> float:
    """Returns the median of the time between events around a call that the device has not caught up with."""
    call()
    pairs = [[torch.Event("cuda", enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for start, end in pairs:
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # longer than the host takes
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(median(start.elapsed_time(end) * 1e3 for start, end in pairs))


def host_us(call: Callable[[], object]) -> float:
    """Returns the median time for which a call occupies the host."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return median(times)


if __name__ == "__main__":
    main()
