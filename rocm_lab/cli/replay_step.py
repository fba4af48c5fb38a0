"""`rocm-attn replay-step`: runs one step of a flight recorder's dump eagerly, as a graph, and by the reference."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape, token_places
from rocm_attn.batch.prefixes import SharedPrefixes
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK, bitwise_equal
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.cli.arguments import device_named
from rocm_attn.cli.streams import json_text
from rocm_attn.errors import BadSetting, NeverFits, RocmAttnError
from rocm_attn.kernels.cache.records import RecordParts
from rocm_attn.oracle.numerics import Bound, bounds_of, eight_bit_queries, error_parts
from rocm_attn.oracle.reference import attend_paged
from rocm_attn.paging.index_spaces import RESERVED_PAGE, num_pages
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.problem import Problem, Scales
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.step import Part
from rocm_attn.watch.flight_recorder import FlightDump, NotedStep, RuntimeFacts, read_dump

# Pages that are filled with random values at a time.
_FILL_PAGES = 1024

AGREES, DIFFERS = "agrees", "differs"


class StepsDisagree(RocmAttnError):
    """Two of the ways to run a step gave different results."""


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The results of one kind of layer.

    eager:   the eager step against the reference
    graph:   the replayed step against the reference; the reason if it could not be captured
    bitwise: True if the replayed step equals the eager one bitwise
    worst:   the largest |eager - reference|
    """

    kind: int
    eager: str
    graph: str
    bitwise: bool | None
    worst: float


def run(options: argparse.Namespace) -> None:
    """Runs a step of options.dump in every way and prints which agree. Raises StepsDisagree if two do not.

    With options.simulate the dump is evidence, whose cause is looked for. Raises WrongResult if there is one, and
    BadSetting for options of dumps.
    """
    if options.simulate:
        of_dumps = {"--step": options.step, "--device": options.device, "--provider": options.provider}
        if given := [flag for flag, value in of_dumps.items() if value is not None]:
            raise BadSetting(
                f"--simulate runs the one step of its evidence, on no device; leave out {', '.join(given)}"
            )
        from rocm_lab.cli import replay_evidence  # it needs Triton

        replay_evidence.run(options)
        return
    dump = read_dump(Path(options.dump))
    noted = dump.step(options.step)
    replay = _Replay.build(dump, noted, device_named(options.device), options.provider, options.seed)
    results = replay.results()
    if options.json:
        facts = {
            "device": str(replay.runtime.device),
            "same_kernels": replay.same_kernels,
            "deterministic": replay.runtime.deterministic,
        }
        print(json_text({"step": asdict(noted), **facts, "layer_kinds": [asdict(result) for result in results]}))
    else:
        print("\n".join(_lines(dump, noted, replay, results)))
    if any(DIFFERS in (result.eager, result.graph) or result.bitwise is False for result in results):
        raise StepsDisagree(f"step {noted.number} gives different results")


def _lines(dump: FlightDump, noted: NotedStep, replay: _Replay, results: list[LayerResult]) -> list[str]:
    lines = [
        f"reason of the dump: {dump.reason}",
        f"step {noted.number}: {noted.kind}, {noted.real_seqs} of {noted.padded_seqs} sequences, "
        f"{noted.real_tokens} of {noted.padded_tokens} tokens{', in two halves' if noted.children > 1 else ''}, "
        f"{'a graph' if noted.replayed else 'no graph'}, "
        f"epoch {noted.epoch}, on {dump.runtime.device} ({dump.runtime.arch})",
        f"again on {replay.runtime.device} ({replay.runtime.target.arch}), "
        f"{'the same kernels' if replay.same_kernels else 'other kernels'}",
    ]
    if dump.runtime.options.deterministic:
        lines.append("in deterministic mode, then and now")
    if dump.runtime.guards_off:
        lines.append(f"dumped with SAFEGUARDS OFF: {', '.join(dump.runtime.guards_off)}")
    for result in results:
        how = {True: ", bitwise equal to eager", False: ", not bitwise equal to eager", None: ""}[result.bitwise]
        lines.append(f"layer kind {result.kind}: eager {result.eager} with the reference (worst {result.worst:.2e})")
        lines.append(f"layer kind {result.kind}: graph: {result.graph}{how}")
    return lines


@dataclass(frozen=True, slots=True, eq=False)
class _Replay:
    """A step that can be run again: one layer for each kind, random K, V and q.

    real: places of the real tokens among the padded ones
    qkv:  per kind, at padded sizes
    outs: per kind, [T, q_heads, v_head_dim]; written by each run
    """

    runtime: AttentionRuntime
    batch: StepBatch
    shape: PaddedShape
    real: Tensor
    qkv: tuple[tuple[Tensor, Tensor, Tensor], ...]
    outs: tuple[Tensor, ...]
    same_kernels: bool
    replayable: bool

    @classmethod
    def build(
        cls, dump: FlightDump, noted: NotedStep, device: torch.device, provider: str | None, seed: int
    ) -> _Replay:
        """Rebuilds the step. Raises NeverFits if its pages do not fit this machine, Unsupported."""
        batch = noted.batch()
        runtime = _runtime(dump.runtime, dump.problems, noted, device, provider)
        _reserve(runtime, noted)
        with runtime.stage(batch, runtime.plan(batch, noted.shape)) as step:
            plan = step.plan
        # Staging freed the pages before the windows; the step without a prefix, which runs first, begins before them.
        for row in noted.rows:
            runtime.table.free(row)
        _reserve(runtime, noted)
        generator = torch.Generator(runtime.device).manual_seed(seed)
        num_tokens = plan.shape.num_tokens
        qkv, outs = [], []
        for kind, problem in enumerate(dump.problems):
            _fill(runtime, kind, generator)
            runtime.head_weights.set(kind, HeadWeights.random(problem, generator))
            heads = (problem.num_q_heads, problem.num_kv_heads, problem.num_kv_heads)
            dims = (problem.head_dim, problem.head_dim, problem.v_head_dim)
            q, k, v = (_random((num_tokens, *shape), problem, generator) for shape in zip(heads, dims, strict=True))
            qkv.append((q, k, v))
            outs.append(q.new_empty(num_tokens, problem.num_q_heads, problem.v_head_dim))
        return cls(
            runtime=runtime,
            batch=batch,
            shape=plan.shape,
            real=torch.from_numpy(token_places(batch, plan.shape)[: batch.num_tokens]).to(runtime.device),
            qkv=tuple(qkv),
            outs=tuple(outs),
            same_kernels=plan.key.kernel_names == noted.kernels,
            replayable=plan.replayable,
        )

    def results(self) -> list[LayerResult]:
        """Runs the step in every way."""
        # All results are compared here, in more detail than the check would report.
        runner = StepRunner(self.runtime, self._forward, recorder_for(self.runtime.device), check=NO_CHECK)
        # Makes the lengths of the graph differ from the step's, unless its kernels bake them in.
        batch, prefixes = self.batch, self.batch.prefixes
        shortest = batch.q_len + (prefixes.prefix_len if isinstance(prefixes, SharedPrefixes) else 0)
        runner.run(StepBatch(batch.rows, shortest, batch.q_len, NO_TOKEN_IDS, prefixes=prefixes.alone()), self.shape)
        self.runtime.table.mark_stored(batch.rows, batch.kv_len)  # the pages hold random values there
        runner.run_eagerly(self.batch, self.shape)
        eager = [out.clone() for out in self.outs]
        for out in self.outs:
            out.fill_(float("nan"))
        runner.run(self.batch, self.shape)
        few = "a step without sequences is captured with others alone"
        why = few if self.replayable else "steps of this kind and size are not captured"
        no_graph = "" if runner.graph_of_last else runner.counters.graphs_off or why
        return [self._result(kind, eager[kind], no_graph) for kind in range(len(self.outs))]

    def _forward(self, step: Part) -> Tensor:
        for kind, (q, k, v) in enumerate(self.qkv):
            used = step.tokens
            step.layers.store_and_attend(kind, q[used], k[used], v[used], self.outs[kind][used])
        return self.outs[0][step.tokens].index_select(0, step.last_token_of_seq)

    def _result(self, kind: int, eager: Tensor, no_graph: str) -> LayerResult:
        batch, problem = self.batch, self.runtime.selections[kind].problem
        pages = self.runtime.pool.layer(kind)
        space = self.runtime.pool.space_of_layer(kind)
        held = [self.runtime.table.pages_of(row, space).tolist() for row in batch.rows.tolist()]
        real = self.real
        q = self.qkv[kind][0][real]
        weights = self.runtime.head_weights.of(kind)
        want, _ = attend_paged(q, pages, held, batch.kv_len.tolist(), batch.q_len.tolist(), problem, weights)
        # If a kernel rounds its operands, the result may be that of rounded queries.
        eight_bits = self.runtime.selections[kind].eight_bit_products
        if eight_bits:
            q = eight_bit_queries(q, problem.page_format.encoding.dtype)
            rounded, _ = attend_paged(q, pages, held, batch.kv_len.tolist(), batch.q_len.tolist(), problem, weights)
            want = rounded if _distance(eager[real], rounded) < _distance(eager[real], want) else want
        bound = bounds_of(problem.dtype, eight_bit_products=eight_bits).out
        worst = float((eager[real].double() - want).abs().max()) if len(q) else 0.0
        graphed = self.outs[kind]
        return LayerResult(
            kind=kind,
            eager=_verdict(eager[real], want, bound),
            graph=f"none: {no_graph}" if no_graph else _verdict(graphed[real], want, bound),
            bitwise=None if no_graph else bitwise_equal(eager, graphed),
            worst=worst,
        )


def _verdict(out: Tensor, want: Tensor, bound: Bound) -> str:
    return AGREES if bool((error_parts(out, want, bound) <= 1).all()) else DIFFERS


def _distance(out: Tensor, want: Tensor) -> float:
    return float((out.double() - want).abs().sum())


def _runtime(
    facts: RuntimeFacts, problems: tuple[Problem, ...], noted: NotedStep, device: torch.device, provider: str | None
) -> AttentionRuntime:
    pages = 2 + sum(num_pages(length, problems[0].page_size) for length in noted.kv_len)
    wanted, available = pages * page_bytes(problems), _available_bytes(device)
    if wanted > available:
        raise NeverFits(
            f"the step's K and V take {wanted} bytes for each kind of layer and {available} are free on {device}; "
            "choose a smaller step or another device"
        )
    options = replace(
        facts.options,
        num_pages=pages,
        swa_pages=pages if facts.options.swa_pages else 0,
        first_swa_page=RESERVED_PAGE + 1,
        provider=facts.options.provider if provider is None else provider,
    )
    return build_runtime(problems, options, device=device)


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _reserve(runtime: AttentionRuntime, noted: NotedStep) -> None:
    """Admits the step's rows, with room for their lengths. Raises BadSetting for rows that no runtime gives out."""
    table = runtime.table
    rows = {table.admit() for _ in range(table.num_free_rows)}
    if not rows >= set(noted.rows):
        raise BadSetting(f"the dump's step {noted.number} names rows outside of its table; the dump is damaged")
    for row in rows.difference(noted.rows):
        table.free(row)
    first, prefixes = 0, noted.prefixes
    for group in prefixes.groups if isinstance(prefixes, SharedPrefixes) else ():
        table.reserve(noted.rows[first], group.prefix_len)
        for row in noted.rows[first + 1 : first + group.num_seqs]:
            table.free(row)
            forked = table.fork(noted.rows[first], group.prefix_len)
            assert forked == row, "the row that was freed last is handed out first"
        first += group.num_seqs
    in_step, kv_len = np.array(noted.rows, np.int32), np.array(noted.kv_len, np.int32)
    table.reserve_all(in_step, kv_len)
    table.mark_stored(in_step, kv_len)


def _fill(runtime: AttentionRuntime, layer: int, generator: torch.Generator) -> None:
    """Writes random K and V, of standard deviation 1, to every page but the reserved one; random codes if eight-bit."""
    pages, form = runtime.pool.layer(layer), runtime.pool.format(layer)
    for raw in (pages.raw_k,) if pages.record is not None else (pages.raw_k, pages.raw_v):
        for first in range(RESERVED_PAGE + 1, len(raw), _FILL_PAGES):
            some = raw[first : first + _FILL_PAGES]
            if pages.record is not None:
                rows = torch.randn(*some.shape[:-1], form.head_dim, generator=generator, device=some.device)
                ids = torch.arange(first, first + len(some), device=some.device)
                pages.record.put((ids,), RecordParts.of_rows(rows, form))
            elif form.encoding.is_fp8:
                drawn = torch.randn(some.shape, generator=generator, device=some.device)
                some.copy_(drawn.to(form.encoding.dtype).view(torch.uint8))
            else:
                some.normal_(generator=generator)
    if form.scales is Scales.TOKEN:
        for scale in (pages.k_scale, pages.v_scale):
            assert scale is not None
            scale[RESERVED_PAGE + 1 :] = 1.0


def _random(shape: tuple[int, ...], problem: Problem, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=problem.dtype)
