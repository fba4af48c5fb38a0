"""Memory of barriers in PTX: nothing else may lie there, not even after their last use.

PTX, mbarrier: any operation on memory that holds an mbarrier, other than the mbarrier's own, has undefined behaviour
until mbarrier.inval. Triton reuses the memory of a barrier that is no longer used. On an H200 that processes shared,
the first value of such a barrier then arrived after the data that were stored in its place.
"""

import re

_BASE = "global_smem"
_BARRIER_BYTES = 8
_PLACE = r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]"
_KNOWN = re.compile(r"\bmov\.[bu]32\s+(%r\d+), (global_smem)(?:\+(\d+))?;|\badd\.s32\s+(%r\d+), (\S+), (-?\d+);")
_BEGUN = re.compile(r"\bmbarrier\.init\S*\s+(\[.*?\])")
_ACCESS = re.compile(
    r"\b(?:ld|st|atom|red)(?:\.\w+)*\.shared(?:::cta)?(?:\.\w+)*?(?:\.v(\d))?\.[a-z]+(\d+)\s.*?" + _PLACE
)


def misused_barriers(ptx: str) -> list[str]:
    """Returns accesses to memory at which a barrier is begun.

    It checks ld, st, atom and red whose address is written in the instruction, but not tiles, whose places threads
    compute, nor the copies of tiles. Raises ValueError if PTX begins no barrier, or one whose address it does not show.
    """
    places = {_BASE: 0}
    barriers = []
    accesses = []
    for line in ptx.splitlines():
        if known := _KNOWN.search(line):
            name, base, offset = known.group(1, 2, 3) if known.group(1) else known.group(4, 5, 6)
            if base in places:
                places[name] = places[base] + int(offset or 0)
        elif begun := _BEGUN.search(line):
            place = re.fullmatch(_PLACE, begun.group(1))
            if place is None or place.group(1) not in places:
                raise ValueError(f"no address of a barrier is known: {line.strip()}")
            barriers.append(places[place.group(1)] + int(place.group(2) or 0))
        elif access := _ACCESS.search(line):
            width, bits, base, offset = access.groups()
            if base in places:
                accesses.append((places[base] + int(offset or 0), int(width or 1) * int(bits) // 8, line.strip()))
    if not barriers:
        raise ValueError("it begins no barrier")
    return [
        line
        for start, size, line in accesses
        if any(start < barrier + _BARRIER_BYTES and barrier < start + size for barrier in barriers)
    ]
