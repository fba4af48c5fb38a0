"""ForkedStream: two functions at the same time on one GPU, in a way that can be captured."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
U = TypeVar("U")


class ForkedStream:
    """A stream that is forked from the current one and joined to it again, by events, around each use.

    A capture follows such a stream into its graph: the two functions become branches of it. Neither may write memory
    that the other one reads or writes.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"streams can be forked only on devices of type cuda (ROCm devices too), got {device}")
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run_both(self, here: Callable[[], T], aside: Callable[[], U]) -> tuple[T, U]:
        """Returns the results of both functions; here runs on the current stream, aside on the forked one.

        The current stream continues when both are done, even if they raise. A result of aside may be used and dropped
        as if it belonged to the current stream: its memory is reused only on the forked stream, which waits for the
        current one each time.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                second = aside()
            first = here()
        finally:
            # A capture that ends before a forked stream is joined is broken.
            current.wait_stream(self._stream)
        return first, second
