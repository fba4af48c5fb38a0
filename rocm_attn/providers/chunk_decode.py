"""Decode in layers with chunks: a provider's decode, over each sequence's keys from the start of its last chunk on."""

from dataclasses import dataclass, replace

from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs, NewRows, Queries
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.tuning.tiles import NoTiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.providers.contract import SMALLEST_POOL, Bind, BoundKernel, PoolSize, StepBounds, StoringKernel
from rocm_attn.providers.schedules import Schedules, whole_units
from rocm_attn.providers.triton_later import triton_launches


@dataclass(frozen=True, slots=True)
class ChunkStarts:
    """The keys of each sequence in its last chunk, and then their first pages. chunk: whole pages"""

    chunk: int
    page_size: int

    def words(self, shape: PaddedShape) -> int:
        return 2 * whole_units(shape.num_seqs)

    @only_launches
    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        found = self.queries(queries, bounds, words)
        assert found.first_page is not None
        triton_launches.launch_chunk_starts(
            queries.kv_len,
            chunk=self.chunk,
            page_size=self.page_size,
            in_chunk=found.kv_len,
            first_page=found.first_page,
        )

    def queries(self, queries: Queries, bounds: StepBounds, words: Tensor) -> Queries:
        """The sequences without the chunks before their last ones."""
        num_seqs, room = queries.num_seqs, whole_units(bounds.shape.num_seqs)
        return replace(queries, kv_len=words[:num_seqs], first_page=words[room : room + num_seqs])


@dataclass(frozen=True, slots=True)
class ChunkSchedule(Schedules):
    """ChunkStarts, and the schedule of decode from there on."""

    @only_launches
    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        (starts, decode), (its_words, own) = self.parts, self.split(bounds.shape, words)
        assert isinstance(starts, ChunkStarts)
        starts.build(queries, step, bounds, its_words)
        decode.build(starts.queries(queries, bounds, its_words), step, bounds, own)


@dataclass(frozen=True, slots=True)
class ChunkDecode:
    """One new token in each sequence; it sees the keys of its chunk. decode: of the layer without chunks"""

    starts: ChunkStarts
    decode: BoundKernel

    @property
    def schedule(self) -> ChunkSchedule:
        return ChunkSchedule((self.starts, self.decode.schedule))

    def describe(self) -> str:
        return f"{self.decode.describe()} over chunks of {self.starts.chunk}"

    def workspace_words(self, shape: PaddedShape) -> int:
        return self.decode.workspace_words(shape)

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        self.decode.attend(self._args(args, bounds), step, bounds)

    def _args(self, args: AttendArgs, bounds: StepBounds) -> AttendArgs:
        """The arguments of decode, from the start of each chunk on."""
        words, own = self.schedule.split(bounds.shape, args.schedule)
        return args._replace(queries=self.starts.queries(args.queries, bounds, words), schedule=own)


@dataclass(frozen=True, slots=True)
class ChunkStoringDecode(ChunkDecode):
    """The same by a kernel that can also store the new rows."""

    decode: StoringKernel

    @only_launches
    def store_and_attend(self, args: AttendArgs, new: NewRows, step: StepTensors, bounds: StepBounds) -> None:
        self.decode.store_and_attend(self._args(args, bounds), new, step, bounds)


def of_chunks(decode: Bind) -> Bind:
    """Returns what binds decode for layers with chunks. decode: binds a kernel that reads Queries.first_page"""

    def bind(problem: Problem, target: Target, pool: PoolSize) -> ChunkDecode:
        chunk = problem.chunk
        if chunk == 0 or chunk % problem.page_size:
            raise NoTiles(f"it serves chunks of whole pages of {problem.page_size}, and not of {chunk} keys")
        within = UNLIMITED_WINDOW if problem.window_left == chunk - 1 else problem.window_left
        layer = replace(problem, chunk=0, window_left=within, custom_mask=False, spans_pass_window=False)
        if pool != SMALLEST_POOL:
            pool = replace(pool, max_kv_len=min(pool.max_kv_len, chunk))
        kernel, starts = decode(layer, target, pool), ChunkStarts(chunk, problem.page_size)
        return ChunkStoringDecode(starts, kernel) if isinstance(kernel, StoringKernel) else ChunkDecode(starts, kernel)

    return bind
