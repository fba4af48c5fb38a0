"""Two nodes on one machine, for servers that an engine's own launcher starts: two network namespaces and a cable.

Shared memory is each node's own, as on two machines: engines try it to find out which ranks share a machine. Where
namespaces are not permitted, the nodes are two addresses of the loopback interface.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A request from within a node: standard input has the body; without one, the request is a GET.
_ASK = """
import sys, urllib.request
body = sys.stdin.buffer.read()
request = urllib.request.Request(sys.argv[1], body or None, {"Content-Type": "application/json"})
sys.stdout.buffer.write(urllib.request.urlopen(request).read())
"""
# Runs a command with shared memory of its own. Each `ip netns exec` has its own mounts.
_ALONE = 'mount -t tmpfs none /dev/shm && exec "$0" "$@"'


@dataclass(frozen=True)
class Node:
    """A node. within: a command's beginning that runs it there; address, interface: of its end of the cable."""

    within: tuple[str, ...]
    address: str
    interface: str

    def ask(self, port: int, path: str, body: object = None) -> bytes:
        """Returns the answer of a server of this node. Raises CalledProcessError if there is none, or an error."""
        said = b"" if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{port}{path}"
        return subprocess.run(
            [*self.within, sys.executable, "-c", _ASK, url], input=said, capture_output=True, check=True
        ).stdout


def may_have_namespaces() -> bool:
    """True if this process may make network namespaces and cables between them."""
    name = f"ra{os.getpid()}try"
    try:
        subprocess.run(["ip", "netns", "add", name], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=True)
    return True


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    if not may_have_namespaces():
        yield Node((), "127.0.0.1", "lo"), Node((), "127.0.0.2", "lo")
        return
    names = [f"ra{os.getpid()}n{number}" for number in range(2)]
    with ExitStack() as made:
        for name in names:
            _ip("netns", "add", name)
            made.callback(_ip, "netns", "delete", name)
        first, second = names
        _ip("link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
        addresses = [f"10.77.0.{number}" for number in (1, 2)]
        for name, address in zip(names, addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            for interface in ("lo", name):
                _ip("-n", name, "link", "set", interface, "up")
        one, other = (
            Node(("ip", "netns", "exec", name, "sh", "-c", _ALONE), address, name)
            for name, address in zip(names, addresses, strict=True)
        )
        yield one, other


@contextmanager
def served(
    nodes: Sequence[Node],
    commands: Sequence[Sequence[object]],
    environments: Sequence[Mapping[str, str]],
    port: int,
    scratch: Path,
) -> Iterator[list[Path]]:
    """Runs a command on each node until the first one's server answers /health. Yields the files that have their logs.

    Raises AssertionError with the end of a log if one of the commands ends.
    """
    logs = [scratch / f"node{number}.log" for number in range(len(nodes))]
    with ExitStack() as running:
        processes = []
        for node, command, environment, log in zip(nodes, commands, environments, logs, strict=True):
            out = running.enter_context(log.open("w"))
            process = subprocess.Popen(
                [*node.within, *map(str, command)],
                cwd=scratch,
                env=dict(environment),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            running.callback(_end, process)
            processes.append(process)
        while not _answers(nodes[0], port):
            for process, log in zip(processes, logs, strict=True):
                assert process.poll() is None, log.read_text()[-6000:]
            time.sleep(1)
        yield logs


def _answers(node: Node, port: int) -> bool:
    try:
        node.ask(port, "/health")
    except subprocess.CalledProcessError:
        return False
    return True


def _end(process: subprocess.Popen[Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(20)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)
