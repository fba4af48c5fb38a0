"""DerivedPorts: every port that a server and the processes that it has started listen on, until all are free."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

# State of a socket that waits for connections, in a line of /proc/net/tcp.
_LISTENS = "0A"


class DerivedPorts:
    """The ports of a running process and of all of its descendants.

    ports: those on which they listen at any address, including the ones that the kernel has chosen for ranks
    """

    def __init__(self, pid: int) -> None:
        processes = family(pid)
        self._ends = [os.pidfd_open(each) for each in processes]
        sockets = {link for each in processes for link in _links(each)}
        self.ports = frozenset(port for port, inode in _listening() if f"socket:[{inode}]" in sockets)

    def wait_until_free(self) -> None:
        """Waits until all these processes have ended, and a server could listen on each of the ports.

        It checks no port before its owner has ended, so there is nothing to try again.
        """
        for end in self._ends:
            select.select([end], [], [])
            os.close(end)
        for port in sorted(self.ports):
            with socket.socket() as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(("127.0.0.1", port))
                tried.listen()


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        for thread in Path(f"/proc/{parent}/task").iterdir():
            found += (int(child) for child in (thread / "children").read_text().split())
    return found


def _links(pid: int) -> list[str]:
    return [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]


def _listening() -> list[tuple[int, str]]:
    """Ports on which some process listens, and the inode of each one's socket."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                found.append((int(fields[1].rpartition(":")[2], 16), fields[9]))
    return found
