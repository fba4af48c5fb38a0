"""Sums with norms, gates of an MLP, and products of one row, in float64."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.kernels.model.add_norm import NormedSum, launch_add_norm
from rocm_attn.kernels.model.few_rows import launch_few_rows
from rocm_attn.kernels.model.gate import CLAMPED, GELU, SILU, GateForm, launch_gate
from rocm_attn.kernels.model.normed_product import launch_normed_product
from rocm_attn.kernels.model.peer_sum import PROGRAMS, REGION_BYTES, PeerMemory, launch_peer_sum, memory_bytes
from rocm_attn.kernels.model.row_product import launch_row_product
from rocm_attn.oracle.numerics import sum_error
from tests.amd.tolerances import assert_attention_close

FORMS = (GateForm(SILU), GateForm(GELU), GateForm(CLAMPED, 0.7, 1.3))
FACTOR, EPS = 0.7, 1e-5
Put = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SumOfRows:
    """residual and output [rows, width] or terms of it [terms, rows, width], and a norm's weight [width]."""

    residual: Tensor
    output: Tensor
    weight: Tensor

    def assert_served(self, put: Put = Tensor.clone) -> None:
        """Checks both results of the kernel. put: where a tensor lies"""
        summed, normed = (put(torch.full_like(self.residual, float("nan"))) for _ in range(2))
        launch_add_norm(NormedSum(put(self.residual), put(self.output), put(self.weight), summed, normed, FACTOR, EPS))
        self.assert_right(summed, normed)

    def assert_multiplied(
        self, num_out: int, form: GateForm | None, put: Put = Tensor.clone, *, has_bias: bool = False
    ) -> None:
        """Checks both results, and the product of the norm with a random matrix, by one kernel."""
        random, width, dtype = torch.Generator().manual_seed(num_out), len(self.weight), self.weight.dtype
        matrix = (1 if form is None else 2) * num_out, width
        weight, bias = (torch.randn(*shape, generator=random) for shape in (matrix, matrix[:1]))
        weight, bias = (put(each.to(self.weight)) for each in (weight * width**-0.5, bias))
        summed, normed = (put(torch.full_like(self.residual, float("nan"))) for _ in range(2))
        out = put(torch.full((1, num_out), float("nan"), dtype=dtype, device=self.weight.device))
        row = NormedSum(put(self.residual), put(self.output), put(self.weight), summed, normed, FACTOR, EPS)
        launch_normed_product(row, weight, bias if has_bias else None, out, 2, form)
        self.assert_right(summed, normed)
        exact = normed.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
        assert_attention_close(out, exact if form is None else exact_gate(exact, form), dtype)

    def assert_right(self, summed: Tensor, normed: Tensor) -> None:
        """Checks the sum, and that `normed` is its norm."""
        residual, output, weight = (each.double() for each in (self.residual, self.output, self.weight))
        output = output if output.dim() == 2 else output.sum(0)
        assert_attention_close(summed, residual + FACTOR * output, self.residual.dtype)
        stored = summed.double()  # the norm is of the rows that later layers read
        exact = stored / (stored.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
        assert_attention_close(normed, exact, self.residual.dtype)


def sum_of_rows(
    rows: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu", terms: int = 1
) -> SumOfRows:
    """Returns random rows; each has a size of its own."""
    random = torch.Generator().manual_seed(rows + 100 * width)
    sizes = torch.logspace(-2, 1, rows)[:, None]
    residual, *output = (torch.randn(rows, width, generator=random) * sizes for _ in range(1 + terms))
    weight = torch.rand(width, generator=random) + 0.5
    given = output[0].to(device, dtype) if terms == 1 else torch.stack(output).to(device)
    return SumOfRows(residual.to(device, dtype), given, weight.to(device, dtype))


def assert_gated(
    rows: int,
    inner: int,
    form: GateForm,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    put: Put = Tensor.clone,
) -> None:
    """Checks the kernel over random rows, some of them beyond the gate's limit. put: where a tensor lies"""
    random = torch.Generator().manual_seed(inner)
    both = torch.randn(rows, 2 * inner, generator=random).to(device, dtype)
    given, out = put(both), put(torch.full((rows, inner), float("nan"), dtype=dtype, device=device))
    launch_gate(given, out, form)
    assert_attention_close(out, exact_gate(both.double(), form), dtype)


def exact_gate(both: Tensor, form: GateForm) -> Tensor:
    """The gate in float64, from the definitions in GLU Variants (arXiv:2002.05202) and gpt-oss's model card."""
    gate, up = both.chunk(2, -1)
    if form.kind == SILU:
        return gate / (1 + (-gate).exp()) * up
    if form.kind == GELU:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + inner.tanh()) * up
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return gate / (1 + (-form.alpha * gate).exp()) * (up + 1)


def assert_row_multiplied(
    sizes: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    put: Put = Tensor.clone,
    *,
    has_bias: bool,
) -> None:
    """Checks the product of a random row and a matrix [out, in]. sizes: out, in; put: where a tensor lies"""
    random = torch.Generator().manual_seed(sum(sizes))
    num_out, num_in = sizes
    x, weight, bias = (torch.randn(*shape, generator=random) for shape in ((1, num_in), sizes, (num_out,)))
    x, weight, bias = (put(each.to(device, dtype)) for each in (x, weight, bias))
    out = put(torch.full((1, num_out), float("nan"), dtype=dtype, device=device))
    launch_row_product(x, weight, bias if has_bias else None, out)
    terms = weight.double() * x.double()
    exact, size = terms.sum(1), terms.abs().sum(1)
    if has_bias:
        exact, size = exact + bias.double(), size + bias.double().abs()
    allowed = sum_error(num_in + 1, size) + torch.finfo(dtype).eps * exact.abs()
    assert bool(((out[0].double() - exact).abs() <= allowed).all())


def assert_few_rows_multiplied(
    sizes: tuple[int, int, int],
    form: GateForm | None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    put: Put = Tensor.clone,
    *,
    parts: int = 1,
    has_bias: bool = False,
) -> None:
    """Checks products of random rows and a matrix. sizes: rows, out, in; put: where a tensor lies"""
    rows, num_out, num_in = sizes
    random = torch.Generator().manual_seed(sum(sizes))
    matrix = (1 if form is None else 2) * num_out, num_in
    x, weight, bias = (torch.randn(*shape, generator=random) for shape in ((rows, num_in), matrix, matrix[:1]))
    x, weight, bias = (put(each.to(device, dtype)) for each in (x, weight * num_in**-0.5, bias))
    shape, of_parts = (parts, rows, num_out), dtype if parts == 1 else torch.float32
    out = put(torch.full(shape, float("nan"), dtype=of_parts, device=device))
    launch_few_rows(x, weight, bias if has_bias else None, out, 132, form)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    assert_attention_close(out.sum(0).to(dtype), exact if form is None else exact_gate(exact, form), dtype)


class OneOfRanks:
    """A rank whose sums run alone: the others' values and flags are written for it.

    All memory is NaN at first, apart from flags. begun: sums that all programs have begun before
    """

    def __init__(self, ranks: int, rank: int, device: torch.device | str = "cpu", begun: int = 0) -> None:
        all_memory = torch.full((ranks, memory_bytes(ranks)), 255, dtype=torch.uint8, device=device)
        addresses = [each.data_ptr() for each in all_memory]
        self.memories = [PeerMemory.of(each, addresses, other) for other, each in enumerate(all_memory)]
        for memory in self.memories:
            memory.flags.fill_(begun)
            memory.counts.fill_(begun)
        self.memory = self.memories[rank]
        self.others = [memory for memory in self.memories if memory is not self.memory]

    def assert_sums(self, dtype: torch.dtype, num: int, put: Put = Tensor.clone, *, last_is_late: bool = False) -> None:
        """Checks the sum of random values bit by bit, and all that is written. last_is_late: the last one waits"""
        random, memory = torch.Generator().manual_seed(num), self.memory
        given = [torch.randn(num, generator=random).to(memory.values.device, dtype) for _ in self.memories]
        x, programs = put(given[memory.rank]), -(-num // block_of(num, dtype))
        counts, flags = memory.counts + 1, [each.flags.clone() for each in self.memories]
        for other in self.others:
            self._write(other, given[other.rank], counts)
        if last_is_late:
            self._sum_while_the_last_is_late(x, given[-1], counts, flags[-1])
        else:
            launch_peer_sum(x, memory)
        total = given[0].float()
        for values in given[1:]:
            total += values.float()
        assert torch.equal(x, total.to(dtype)), "the sum in float32, in the order of ranks, rounded once"
        for each, before in zip(self.memories, flags, strict=True):
            before[:programs, memory.rank] = counts[:programs]
            if each is memory:
                before[:programs] = counts[:programs, None]
            assert torch.equal(each.flags[:programs], before[:programs])
            assert each is memory or torch.equal(each.flags, before)
        assert torch.equal(memory.counts[:programs], counts[:programs])

    def _write(self, other: PeerMemory, values: Tensor, counts: Tensor) -> None:
        """Writes a rank's values, and its flags."""
        regions = other.values.view(2, PROGRAMS, REGION_BYTES).view(values.dtype)
        blocks = torch.split(values, block_of(len(values), values.dtype))
        for program, block in enumerate(blocks):
            regions[int(counts[program]) % 2, program, : len(block)] = block
        self.memory.flags[: len(blocks), other.rank] = counts[: len(blocks)]

    def _sum_while_the_last_is_late(self, x: Tensor, values: Tensor, counts: Tensor, flags: Tensor) -> None:
        """Sums while the last rank has NaN and old flags, until the sum has waited for a while."""
        last = self.others[-1]
        self._write(last, torch.full_like(values, float("nan")), counts)
        self.memory.flags[:, last.rank] = flags[:, last.rank]
        # The sum's own stream waits for the sum.
        aside = torch.cuda.Stream(x.device) if x.is_cuda else None  # type: ignore[no-untyped-call]

        def come() -> None:
            with torch.cuda.stream(aside):
                self._write(last, values, counts)

        timer = threading.Timer(0.3, come)
        timer.start()
        launch_peer_sum(x, self.memory)
        timer.join()


def block_of(num: int, dtype: torch.dtype) -> int:
    """The elements of a program of a sum: 512, or as many times 1,024 as needed if there were too many programs."""
    block = 512 if num <= 512 * PROGRAMS else -(-num // (1024 * PROGRAMS)) * 1024
    assert block * dtype.itemsize <= REGION_BYTES
    return block
