"""The innermost loops of a kernel, from its control-flow graph, and the path of an iteration through each.

A loop is that of an edge back to a block which dominates the edge's source; the layout of the text does not matter. Of
the paths from its first block back to it, the one with the most matrix instructions counts; among equals the one with
the most loads, and then with the fewest instructions: a correction that few iterations need counts as skipped.
"""

from dataclasses import dataclass

from rocm_lab.simulator.assembly import Assembly, Instruction
from rocm_lab.waits.graph import Graph, blocks_of

_MATRIX = ("v_mfma_", "v_smfmac_")
_LOADS = ("buffer_load_", "global_load_")
# The order of paths: matrix instructions, loads, and minus the number of instructions.
_Weight = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop.

    name:      its first block's
    body:      the instructions of an iteration, the branch back last
    priority:  with which waves enter it, by s_setprio
    """

    name: str
    body: tuple[Instruction, ...]
    priority: int = 0

    @property
    def matrix_ops(self) -> int:
        """Matrix instructions of an iteration."""
        return sum(each.name.startswith(_MATRIX) for each in self.body)

    @property
    def barriers(self) -> int:
        """Barriers of an iteration."""
        return sum(each.name == "s_barrier" for each in self.body)


def hot_loop(assembly: Assembly) -> Loop | None:
    """The innermost loop with the most matrix instructions; None if no loop has one. Raises UnknownInstruction."""
    loops = [each for each in innermost_loops(assembly) if each.matrix_ops]
    return max(loops, key=lambda loop: _weight(loop.body), default=None)


def other_half(assembly: Assembly, hot: Loop) -> Loop | None:
    """The loop of the second half of a program's waves, if they run another than the hot one, as in AITER's assembly.

    It has as many matrix instructions and barriers, and a wave gets from one of the two to the other only by the block
    where they part.
    """
    graph = blocks_of(assembly)
    dominators = _dominators(graph)
    starts = {block.name: first for first, block in graph.items()}
    own = starts[hot.name]
    for each in innermost_loops(assembly):
        start = starts[each.name]
        parting = max(dominators[own] & dominators[start], key=lambda block: len(dominators[block]))
        is_apart = start not in _blocks_before(graph, own, parting) and own not in _blocks_before(graph, start, parting)
        if hot.barriers and (each.matrix_ops, each.barriers) == (hot.matrix_ops, hot.barriers) and is_apart:
            return each
    return None


def innermost_loops(assembly: Assembly) -> list[Loop]:
    """The loops that contain no other. Raises UnknownInstruction."""
    graph = blocks_of(assembly)
    dominators = _dominators(graph)
    bodies: dict[int, set[int]] = {}
    for source, block in graph.items():
        for first in block.followers:
            if first in dominators[source]:
                bodies.setdefault(first, {first}).update(_blocks_before(graph, source, first))
    innermost = {
        first: body for first, body in bodies.items() if not any(other in body for other in bodies if other != first)
    }
    return [
        Loop(graph[first].name, _path(assembly, graph, first, body), _priority(assembly, graph, first, body))
        for first, body in innermost.items()
    ]


def is_staggered(assembly: Assembly) -> bool:
    """True if some waves pass one barrier more than the others before the loop: a block of a barrier that others skip.

    So Triton's warp pipelining runs half of a program's waves one stage later (ConvertWarpPipeline, cond_barrier).
    """
    graph = blocks_of(assembly)
    for block in graph.values():
        names = [each.name for each in assembly.instructions[block.first : block.last]]
        is_barrier = "s_barrier" in names and all(name.startswith(("s_", "; ")) for name in names)
        skippers = [each for each in graph.values() if block.first in each.followers and len(each.followers) > 1]
        if (
            is_barrier
            and len(names) <= _BARRIER_BLOCK
            and any(set(block.followers) & set(each.followers) for each in skippers)
        ):
            return True
    return False


# A block of a barrier may have a wait and a branch too.
_BARRIER_BLOCK = 4


def _weight(instructions: tuple[Instruction, ...]) -> _Weight:
    matrix = sum(each.name.startswith(_MATRIX) for each in instructions)
    loads = sum(each.name.startswith(_LOADS) for each in instructions)
    return matrix, loads, -len(instructions)


def _dominators(graph: Graph) -> dict[int, set[int]]:
    """Block -> the blocks that every path to it passes."""
    before: dict[int, list[int]] = {first: [] for first in graph}
    for first, block in graph.items():
        for follower in block.followers:
            before[follower].append(first)
    found = {first: set(graph) for first in graph}
    found[0] = {0}
    is_new = True
    while is_new:
        is_new = False
        for first in graph:
            if first:
                dominators = {first} | set.intersection(*(found[each] for each in before[first]))
                is_new |= dominators != found[first]
                found[first] = dominators
    return found


def _blocks_before(graph: Graph, source: int, first: int) -> set[int]:
    """The blocks that lead to source without passing first."""
    found, waiting = {first}, [source]
    while waiting:
        block = waiting.pop()
        if block not in found:
            found.add(block)
            waiting += [each for each in graph if block in graph[each].followers]
    return found


def _priority(assembly: Assembly, graph: Graph, first: int, body: set[int]) -> int:
    """That of the last s_setprio in the blocks before the loop."""
    enter = [block for index, block in graph.items() if first in block.followers and index not in body]
    instructions = [each for block in enter for each in assembly.instructions[block.first : block.last]]
    given = [each.count for each in instructions if each.name == "s_setprio"]
    return given[-1] if given else 0


def _path(assembly: Assembly, graph: Graph, first: int, body: set[int]) -> tuple[Instruction, ...]:
    """The best path from first back to it, within an innermost loop."""
    best: dict[int, tuple[Instruction, ...] | None] = {}

    def path_from(block: int) -> tuple[Instruction, ...] | None:
        if block not in best:
            own = assembly.instructions[graph[block].first : graph[block].last]
            ways: list[tuple[Instruction, ...]] = [()] if first in graph[block].followers else []
            ways += [way for each in graph[block].followers if each in body - {first} and (way := path_from(each))]
            best[block] = max((own + way for way in ways), key=_weight, default=None)
        return best[block]

    found = path_from(first)
    assert found is not None, "a loop has a path back to its first block"
    return found
