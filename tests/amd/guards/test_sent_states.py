"""States that are sent to another runtime: what may happen to their bytes on the way, with the safeguard and without.

With it the import is refused, and the row can be filled by a second try; without it the text goes on, and is wrong.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.guards.registry import Guards
from rocm_attn.integrations.kv_passport import KVExtent
from rocm_attn.integrations.kv_transfer import KVExporter, KVImporter
from tests.amd.worlds.hybrid import GATED_DELTA, Hybrid, Told
from tests.amd.worlds.world import ALL_ON

NUM_TOKENS = 7


def sent(world: Hybrid, num_tokens: int) -> tuple[Told, KVExtent, Tensor]:
    """A new request of this many tokens, its extent, and the buffer that export_row() has written."""
    one, exporter = world.admit(), KVExporter(world.runtime)
    world.run([one], [world.ids(num_tokens)])
    extent = exporter.extent(exporter.pages_of(one.row, num_tokens), num_tokens)
    buffer = torch.zeros(exporter.num_bytes(extent), dtype=torch.uint8, device=world.runtime.device)
    exporter.export_row(one.row, num_tokens, buffer)
    return one, extent, buffer


def record_of(world: Hybrid, buffer: Tensor) -> Tensor:
    """uint8: the part with the state, which is a line of 256 bytes and a slot."""
    return buffer[-(256 + world.runtime.states.memory.shape[1]) :]


def flipped_bits(world: Hybrid, buffer: Tensor) -> str:
    """Elements of the state have other exponents."""
    of_state, memory = world.runtime.states.state[0].state, world.runtime.states.memory
    first = 256 + of_state.data_ptr() - memory.data_ptr()
    record_of(world, buffer)[first + 3 : first + of_state[0].nbytes : 4] ^= 2
    return r"are not those that export_row\(\) wrote, because their checksum differs"


def of_another_request(world: Hybrid, buffer: Tensor) -> str:
    """The state of another request, of as many tokens, comes with these."""
    _, _, other = sent(world, NUM_TOKENS)
    record_of(world, buffer).copy_(record_of(world, other))
    return r"are not those that export_row\(\) wrote, because their checksum differs"


def of_fewer_tokens(world: Hybrid, buffer: Tensor) -> str:
    """The sender's copy of the state was a token behind, and its sum was made afterwards."""
    _, _, other = sent(world, NUM_TOKENS - 1)
    record = record_of(world, buffer)
    record.copy_(record_of(world, other))
    words, tokens = record.view(torch.int64), buffer[: -len(record)].view(torch.int64)
    lines = [*torch.split(words, 32), *torch.split(tokens, 32)]
    total = sum((2 * number + 1) * word for number, line in enumerate(lines) for word in line.tolist())
    check = (int(words[2]) - total) % 2**64
    words[2] = check - 2**64 if check >> 63 else check
    return "the buffer holds the state after 6 tokens, 6 of them folded, and the extent has 7"


@pytest.mark.parametrize("happens", [flipped_bits, of_another_request, of_fewer_tokens], ids=lambda each: each.__name__)
def test_a_state_that_is_not_that_of_the_tokens_sent_is_refused(
    happens: Callable[[Hybrid, Tensor], str], device: torch.device
) -> None:
    source = Hybrid(device, "torch", layers=(GATED_DELTA,))
    one, extent, good = sent(source, NUM_TOKENS)
    spoiled = good.clone()
    why = happens(source, spoiled)

    def arriving(guards: Guards) -> tuple[Hybrid, KVImporter, Told]:
        target = Hybrid(device, "torch", layers=(GATED_DELTA,), guards=guards)
        importer = KVImporter(target.runtime, KVExporter(source.runtime).passport)
        return target, importer, Told(importer.admit(extent), list(one.ids))

    target, importer, moved = arriving(ALL_ON)
    with pytest.raises(BadTensor, match=why):
        importer.import_row(moved.row, extent, spoiled)
    importer.import_row(moved.row, extent, good)
    target.step([moved], [target.ids(1)])
    target.runtime.check_device()

    target, importer, moved = arriving(Guards().without("sent_state"))
    importer.import_row(moved.row, extent, spoiled)
    new = target.ids(1)
    out = target.run([moved], [new])
    target.runtime.check_device()  # nothing is reported
    assert not target.is_right(out, [moved], [new])


@pytest.mark.gpu
@pytest.mark.parametrize("to_gpu", [True, False], ids=["to the GPU", "from the GPU"])
def test_a_state_that_crosses_to_another_kind_of_device_is_checked_there(to_gpu: bool, device: torch.device) -> None:
    """Both add up the same words, on a GPU in another order."""
    sides = (torch.device("cpu"), "torch"), (device, "triton")
    from_side, to_side = sides if to_gpu else sides[::-1]
    source = Hybrid(*from_side, seed=1)
    one, extent, buffer = sent(source, NUM_TOKENS)
    arrived = buffer.to(to_side[0])
    spoiled = arrived.clone()
    record_of(source, spoiled)[-1] ^= 1
    passport = KVExporter(source.runtime).passport

    target = Hybrid(*to_side, seed=1)
    importer = KVImporter(target.runtime, passport)
    moved = Told(importer.admit(extent), list(one.ids))
    with pytest.raises(BadTensor, match="because their checksum differs"):
        importer.import_row(moved.row, extent, spoiled)
    importer.import_row(moved.row, extent, arrived)
    target.step([moved], [target.ids(1)])
    target.step([moved], [target.ids(5)])
    target.runtime.check_device()
