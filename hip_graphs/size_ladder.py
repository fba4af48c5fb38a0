"""SizeLadder: the sizes at which a function is recorded. Work of another size is padded to the next one up."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from rocm_attn.hip_graphs.errors import BadLadder, SizeExceeded

# Steps of 8 up to 256, then a sixteenth of the power of two below: 35 sizes up to 256, 51 up to 512, and padding
# beyond 128 costs at most a sixteenth.
SMALLEST_STEP = 8
STEPS_PER_OCTAVE = 16


@dataclass(frozen=True, slots=True)
class SizeLadder:
    """sizes: ascending, unique, each at least 1; in the caller's unit. Raises BadLadder."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if not self.sizes:
            raise BadLadder("a ladder needs at least one size")
        if not all(type(size) is int for size in self.sizes):
            raise BadLadder(f"ladder sizes must be whole numbers, got {self.sizes}")
        if self.sizes[0] < 1 or any(low >= high for low, high in zip(self.sizes, self.sizes[1:], strict=False)):
            raise BadLadder(f"ladder sizes must be at least 1 and ascend without repeats, got {self.sizes}")

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def fit(self, n: int) -> int:
        """Returns the smallest size >= n; n = 0 takes the smallest size. Raises SizeExceeded above the largest."""
        if n < 0:
            raise SizeExceeded(f"size {n} is not possible; give a size of at least 0")
        place = bisect_left(self.sizes, n)
        if place == len(self.sizes):
            raise SizeExceeded(
                f"{n} is larger than the largest recorded size {self.largest}; record sizes up to {n}, or run this "
                "one without a recording"
            )
        return self.sizes[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def default_ladder(largest: int, alignment: int = 1) -> SizeLadder:
    """Returns the sizes 1, 2, 4, 8, 16, 24 ... up to largest, in steps that grow, each rounded up to the alignment.

    alignment: a divisor of every size (tensor-parallel ranks, halves of an overlapped step). The last size is largest
    rounded up, so it may exceed the caller's largest work. Raises BadLadder.
    """
    if not type(largest) is type(alignment) is int or min(largest, alignment) < 1:
        raise BadLadder(f"largest size {largest} and alignment {alignment} must both be whole numbers, at least 1")
    sizes = {round_up(largest, alignment)}
    size = 1
    while size < largest:
        sizes.add(round_up(size, alignment))
        size += _step_after(size)
    return SizeLadder(tuple(sorted(sizes)))


def _step_after(size: int) -> int:
    power_below = 1 << (size.bit_length() - 1)
    return min(size, max(SMALLEST_STEP, power_below // STEPS_PER_OCTAVE))


def round_up(size: int, alignment: int) -> int:
    """Returns the smallest multiple of alignment that is at least size."""
    return -(-size // alignment) * alignment
