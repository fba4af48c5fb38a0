"""A process that tries whether constraints can be used, for a server that takes them from untrusted clients.

A few short constraints take minutes, or gigabytes, to compile, and a thread that compiles one cannot be ended. The
kernel ends this process if a constraint takes too much. The server then starts another one.

It reads lines of JSON, first a TrialTokens and then one Constraint after another, and answers each constraint with a
line.
"""

import json
import math
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from rocm_attn.errors import BadRequest
from rocm_serve.text.constraint import Constraint, compiled_of, tokens_of, why_failed

# Address space that compiling may take in addition to the tokenizer's.
_GIB = 1


@dataclass(frozen=True, slots=True)
class TrialTokens:
    """The tokens that constraints are tried on.

    tokenizer:  as tokenizers.Tokenizer.to_str() writes it
    vocab_size: of the logits
    """

    tokenizer: str
    vocab_size: int


class TrialProcess:
    """The process, as its owner sees it. One thread at a time may use it.

    seconds: of a core, that a constraint may take
    """

    def __init__(self, tokens: TrialTokens, seconds: int) -> None:
        self._seconds = seconds
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import run; run()"]
        # A session of its own: Ctrl-C goes to all processes of a terminal, and the owner still answers its clients.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._is_given_up = False
        self._send(asdict(tokens))

    def check(self, constraint: Constraint) -> None:
        """Raises BadRequest if a constraint cannot be used.

        If has_ended is True afterwards, make another TrialProcess.
        """
        self._send({**asdict(constraint), "seconds": self._seconds})
        answer = _of(self._process.stdout).readline()
        if not answer:
            raise BadRequest(f"the constraint cannot be used: {self._why_silent()}")
        refused = json.loads(answer)
        if refused:
            raise BadRequest(refused)

    @property
    def has_ended(self) -> bool:
        """True if the process answers no more."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Kills the process, whatever it does; a check() in another thread then raises."""
        self._is_given_up = True
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Closes the pipes. Call it after end(), when no check() runs."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # a line has not reached the process
                _of(pipe).close()

    def _why_silent(self) -> str:
        """Returns why the process ended. Call it when the process is at its end."""
        self._process.kill()  # a process that has only closed its end of the pipe would go on
        code = self._process.wait()
        if self._is_given_up:
            return "the process that checked it was ended, which happens when the server ends; send it again"
        if code == -signal.SIGXCPU:
            return f"it takes more than {self._seconds} CPU seconds to compile; simplify it"
        if code == -signal.SIGABRT:  # the library aborts without memory
            return f"the library gave up (SIGABRT), which happens if {_GIB} GiB are not enough; simplify it"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"the process that checked it {how}; simplify it, or send it again"

    def _send(self, line: dict[str, Any]) -> None:
        pipe = _of(self._process.stdin)
        try:
            pipe.write(json.dumps(line).encode() + b"\n")
            pipe.flush()
        except OSError:
            self._process.kill()  # check() finds that nothing comes


def run() -> None:
    """Answers until there is nothing more to read."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first = json.loads(sys.stdin.readline())
    tokens, why = None, ""
    try:
        tokens = tokens_of(first["tokenizer"], first["vocab_size"], (0,))
    except BadRequest as error:
        why = str(error)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, taken + (_GIB << 30))
    for line in sys.stdin:
        requested = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _lower(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + requested["seconds"])
        answer = why or _why_not(tokens, Constraint(requested["kind"], requested["text"], requested["lead"]))
        print(json.dumps(answer), flush=True)


def _why_not(tokens: Any, constraint: Constraint) -> str:
    try:
        # After a lead, the library notes that no text can follow only where one would begin.
        for each in dict.fromkeys((replace(constraint, lead=""), constraint)):
            compiled_of(each, tokens)
    except BadRequest as error:
        return str(error)
    except MemoryError:
        return f"the constraint cannot be used: it takes more than {_GIB} GiB to compile; simplify it"
    except BaseException as error:  # a panic of the library is not an Exception
        return why_failed(error)
    return ""


def _lower(which: int, soft: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _of(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
