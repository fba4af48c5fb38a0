"""Served: `rocm-attn serve` in a separate process, which can be ended in every way that processes end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import torch

from rocm_attn.cli import main
from rocm_serve import engine_process
from tests.amd.forked import context
from tests.amd.server.scraped import families_of

# Few rows and pages: requests wait, and sequences are preempted.
FLAGS = (
    *("--device", "cpu", "--provider", "torch", "--deterministic", "--no-graphs"),
    *("--page-size", "4", "--max-batch-size", "32", "--chunk", "64", "--max-kv-len", "128", "--num-pages", "300"),
    *("--max-requests", "256", "--served-model-name", "tiny"),
)


class Served:
    """A server on 127.0.0.1.

    port: the port on which it listens
    log:  its stderr so far, in lines
    """

    def __init__(
        self, model: Path, *flags: str, port: int = 0, end_seconds: float = engine_process._END_SECONDS
    ) -> None:
        """It listens when this returns. Raises AssertionError, with its log, if it does not start.

        end_seconds: before its engine is killed that was asked to end
        """
        reading, writing = Pipe(duplex=False)
        arguments = ["serve", "--model", str(model), "--port", str(port), *FLAGS, *flags]
        self._process = context().Process(target=_run, args=(arguments, writing, end_seconds))
        self._process.start()
        writing.close()
        self.log: list[str] = []
        self._news = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, args=(reading,))
        self._reader.start()
        line = self.wait_for("listening on http://")
        self.port = int(line.rpartition(":")[2])

    @property
    def pid(self) -> int:
        """The id of its process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, text: str) -> str:
        """Waits for a line of its log with a text, and returns it. Raises AssertionError if the process ends first."""
        with self._news:
            while True:
                found = next((line for line in self.log if text in line), None)
                if found is not None:
                    return found
                assert not self._has_ended, f"the server ended without saying {text!r}:\n" + "\n".join(self.log)
                self._news.wait()

    def counts(self) -> Counts:
        """Returns its current metrics."""
        return Counts.of(self.get("/metrics"))

    def get(self, path: str) -> str:
        """Returns its answer. Raises OSError."""
        with urllib.request.urlopen(self.url + path) as answer:
            text: str = answer.read().decode()
            return text

    def assert_served_all(self) -> None:
        """Checks that none was answered 500, and that nothing is left of any, once the server knows who has left."""
        while (counts := self.counts())["requests_total"] != counts["requests_ended_total"]:
            pass
        counts.assert_empty()
        assert counts["http_requests_total:status=500"] == 0

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        """Waits for its end, and returns its exit code."""
        self._process.join()
        self._reader.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def stop(self) -> None:
        """Lets it drain, if it runs, and waits for its end."""
        if self._process.is_alive():
            self.send(signal.SIGTERM)
        self.end()

    def _read(self, reading: Connection) -> None:
        with os.fdopen(os.dup(reading.fileno()), errors="replace") as lines:
            reading.close()
            for line in lines:
                with self._news:
                    self.log.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()


@contextlib.contextmanager
def served(model: Path, *flags: str, port: int = 0) -> Iterator[Served]:
    """A server that has ended when the context is left."""
    server = Served(model, *flags, port=port)
    try:
        yield server
    finally:
        server.stop()


class Counts:
    def __init__(self, values: dict[str, float]) -> None:
        self._values = values

    @classmethod
    def of(cls, text: str) -> Counts:
        """Samples of one name are added up."""
        values: dict[str, float] = {}
        for family in families_of(text).values():
            for each in family.samples:
                values[each.name] = values.get(each.name, 0.0) + each.value
                for label, value in each.labels.items():
                    key = f"{each.name}:{label}={value}"
                    values[key] = values.get(key, 0.0) + each.value
        return cls(values)

    def __getitem__(self, name: str) -> float:
        """A value without its prefix, of all labels together, or of one: "http_requests_total:status=200"."""
        for prefix in ("rocm_attn_", ""):
            if f"{prefix}{name}" in self._values:
                return self._values[f"{prefix}{name}"]
        assert re.fullmatch(r"\w+:\w+=.*", name), f"there is no metric {name}"
        return 0.0

    @property
    def pages_of_requests(self) -> float:
        """Pages that are held by more than the prefix cache."""
        return self["pages_in_use"] - self["cached_pages"]

    def assert_empty(self) -> None:
        """Checks that no request is in the engine, nothing of one is left, and all accepted ones have ended."""
        left = {name: self[name] for name in ("running", "waiting")}
        assert (left, self.pages_of_requests) == ({"running": 0, "waiting": 0}, 0)
        assert self["requests_total"] == self["requests_ended_total"]


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        for thread in Path(f"/proc/{parent}/task").iterdir():
            found += (int(child) for child in (thread / "children").read_text().split())
    return found


def _run(arguments: list[str], writing: Connection, end_seconds: float) -> None:
    os.dup2(writing.fileno(), 2)
    engine_process._END_SECONDS = end_seconds
    torch.set_num_threads(1)
    sys.exit(main(arguments))
