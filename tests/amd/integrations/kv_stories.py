"""Requests whose K and V move between runtimes: their tokens, transfers, and what must stay as it was."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.integrations.kv_passport import KVExtent, KVPassport
from rocm_attn.integrations.kv_transfer import KVExporter, KVImporter, Pages
from rocm_attn.integrations.owners import Owner
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit
from rocm_attn.problem import Indexer, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.worlds.problems import indexer, layer, record_layer, small_problem

FN, FNUZ = KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ
POISON = 173


def runtime_of(problems: Sequence[Problem], device: torch.device, provider: str, **options: Any) -> AttentionRuntime:
    """Returns a runtime whose pages are all NaN, so that missing transfers show."""
    sizes: dict[str, Any] = {"num_pages": 48, "max_num_seqs": 4, "max_kv_len": 64, **options}
    runtime = build_runtime(problems, RuntimeOptions(provider=provider, **sizes), device=device)
    for number, problem in enumerate(problems):
        runtime.pool.layer(number).fill_nan(slice(1, None))
        if problem.index_format is not None:
            runtime.pool.index(number).fill_nan(slice(1, None))
    return runtime


class Story:
    """The tokens of one request, layer by layer, which several runtimes are given."""

    def __init__(self, problems: Sequence[Problem], device: torch.device) -> None:
        self.problems, self.device = problems, device

    def rows(self, layer: int, first: int, count: int, heads: int, dim: int, what: int) -> Tensor:
        """Returns rows of tokens [first, first + count): each token has its own seed."""
        each = [
            torch.randn(heads, dim, generator=torch.Generator().manual_seed(hash((layer, first + token, what)) % 2**31))
            for token in range(count)
        ]
        return torch.stack(each).to(self.device, self.problems[layer].dtype)

    def step(self, runtime: AttentionRuntime, row: int, kv_len: int, q_len: int) -> list[Tensor]:
        runtime.table.reserve(row, kv_len)
        step = runtime.step(StepBatch([row], [kv_len], [q_len])).parts[0]
        outs, first = [], kv_len - q_len
        for number, problem in enumerate(self.problems):
            q = self.rows(number, first, q_len, problem.num_q_heads, problem.head_dim, 0)
            k = self.rows(number, first, q_len, problem.num_kv_heads, problem.head_dim, 1)
            v = self.rows(number, first, q_len, problem.num_kv_heads, problem.v_head_dim, 2)
            v = k[..., : problem.v_head_dim] if problem.pool is PoolKind.LATENT else v
            out = torch.empty_like(q[..., : problem.v_head_dim])
            step.layers.store(number, k, v)
            if isinstance(problem.indexer, Indexer):
                chooses = problem.indexer
                step.layers.store_index(number, self.rows(number, first, q_len, 1, chooses.head_dim, 3)[:, 0])
                step.layers.select(number, self.rows(number, first, q_len, chooses.num_heads, chooses.head_dim, 4))
                step.layers.attend_selected(number, q, out)
            else:
                step.layers.attend(number, q, out)
            outs.append(out.clone())
        runtime.end_step()
        return outs

    def prefill(self, runtime: AttentionRuntime, kv_len: int) -> int:
        row = runtime.table.admit()
        for done in range(0, kv_len, 8):
            count = min(8, kv_len - done)
            self.step(runtime, row, done + count, count)
        return row

    def decode(self, runtime: AttentionRuntime, row: int, kv_len: int) -> list[Tensor]:
        return [out for new in range(1, 6) for out in self.step(runtime, row, kv_len + new, 1)]


def exported(owner: Owner, pages: Pages, kv_len: int) -> tuple[KVExporter, KVExtent, Tensor]:
    """Returns an exporter, and the extent and the buffer of the tokens that it has sent."""
    exporter = KVExporter(owner)
    extent = exporter.extent(pages, kv_len)
    buffer = torch.zeros(exporter.num_bytes(extent), dtype=torch.uint8, device=exporter.device)
    exporter.export(pages, extent, buffer)
    return exporter, extent, buffer


def of_row(runtime: AttentionRuntime, row: int, kv_len: int) -> tuple[KVExporter, KVExtent, Tensor]:
    """Returns the same of a runtime's row, with its checksum."""
    exporter = KVExporter(runtime)
    extent = exporter.extent(exporter.pages_of(row, kv_len), kv_len)
    buffer = torch.zeros(exporter.num_bytes(extent), dtype=torch.uint8, device=exporter.device)
    exporter.export_row(row, kv_len, buffer)
    return exporter, extent, buffer


@contextmanager
def unchanged(runtime: AttentionRuntime) -> Iterator[None]:
    """Checks that no page of a runtime is written."""
    before = [tensor.clone() for tensor in storages(runtime)]
    yield
    for tensor, was in zip(storages(runtime), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), was.view(torch.uint8))


def moved(source: AttentionRuntime, row: int, kv_len: int, target: AttentionRuntime) -> int:
    """Moves the request to the target and returns its row. The buffer's surroundings and other pages must stay."""
    exporter, importer = KVExporter(source), KVImporter(target, KVPassport.from_json(KVPassport.of(source).to_json()))
    extent = exporter.extent(exporter.pages_of(row, kv_len), kv_len)
    num_bytes = exporter.num_bytes(extent)
    memory = torch.full((num_bytes + 64,), POISON, dtype=torch.uint8, device=source.device)
    assert exporter.export_row(row, kv_len, memory[32 : 32 + num_bytes]) == extent
    assert (memory[:32] == POISON).all()
    assert (memory[32 + num_bytes :] == POISON).all()
    before = {tensor: tensor.clone() for tensor in storages(target)}
    new_row = importer.admit(extent)
    importer.import_row(new_row, extent, memory[32:])
    for pages, tensor_before in before.items():
        assert_others_untouched(target, pages, tensor_before)
    return new_row


def storages(runtime: AttentionRuntime) -> list[Tensor]:
    pools = (runtime.pool.in_space(table.space) for table in runtime.table.spaces)
    return [line for pool in pools for layer in pool.layers for line in layer.lines]


def assert_others_untouched(runtime: AttentionRuntime, pages: Tensor, before: Tensor) -> None:
    """Checks that pages without a row, and the reserved one, are unchanged."""
    held = torch.zeros(len(pages), dtype=torch.bool, device=pages.device)
    for space in runtime.table.spaces:
        entries = torch.from_numpy(np.unique(space.entries_host)).long()
        held[entries[(entries > 0) & (entries < len(pages))]] = True
    same = (pages == before) | ((pages != pages) & (before != before))
    assert same[~held].all()


def coded(encoding: KVEncoding, scales: Scales) -> list[Problem]:
    return [replace(small_problem(), kv_encoding=encoding, kv_scales=scales)] * 2


LATENT = replace(small_problem(num_kv_heads=1, head_dim=24, v_head_dim=16), pool=PoolKind.LATENT)
MODELS = {
    "codes with scales of tokens": coded(FN, Scales.TOKEN),
    "plain": [small_problem()] * 3,
    "different layers": [small_problem(), small_problem(num_kv_heads=3, head_dim=20, v_head_dim=12)],
    "codes": coded(FNUZ, Scales.HEAD),
    "latents": [LATENT] * 2,
    # A page of 100 bytes is no whole number of words.
    "latent codes": [replace(LATENT, head_dim=21, kv_encoding=FN, kv_scales=Scales.TOKEN)],
    "latent records": [record_layer()],
    "index keys": [layer(indexer(Indexing(0.25, top=5))), layer()],
    "index keys of several tokens": [layer(indexer(Indexing(0.25, top=3, key_tokens=4, last_unit=LastUnit.ADDED)))],
    "bfloat16": [small_problem(dtype=torch.bfloat16)] * 2,
}
