"""Health: whether the server can serve anything, as its own requests and its truth probe have shown."""


class Health:
    """The requests that failed in a row, and the last verdict of the truth probe.

    A server that fails fast attracts a balancer's requests, so it must say that it fails.

    most_failures: in a row that are borne
    """

    def __init__(self, most_failures: int) -> None:
        self._most_failures = most_failures
        self._num_failures = 0
        self._cause = ""
        self._untruth = ""

    @property
    def trouble(self) -> str:
        """Why nothing should be sent here, in a sentence; empty if the server is well."""
        if self._untruth:
            return self._untruth
        if self._num_failures >= self._most_failures:
            return (
                f"the last {self._num_failures} requests have failed with no success between; the last: {self._cause}"
            )
        return ""

    def note_failure(self, cause: str) -> None:
        """Notes a request that failed through no fault of its client."""
        self._num_failures += 1
        self._cause = cause

    def note_success(self) -> None:
        """Notes a request that was answered in full."""
        self._num_failures = 0

    def note_truth(self, untruth: str) -> None:
        """Notes a verdict of the truth probe. untruth: its finding in a sentence; empty if all was right"""
        self._untruth = untruth
        if not untruth:
            self._num_failures = 0
