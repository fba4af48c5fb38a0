"""A server for the pages' clients. The pages' 127.0.0.1:8000 and smollm2 become its address and a tiny model."""

import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

import rocm_serve
from tests.amd.docs.reader import Reader, environment
from tests.amd.runner.tiny_model import CONFIG, tiny_model, word_tokenizer
from tests.amd.server.running import NAME, running

ADDRESS = "127.0.0.1:8000"


@contextmanager
def against_a_server(text: str) -> Iterator[str]:
    """Yields the text of a page's block with the address and the model of a running server."""
    cpu = torch.device("cpu")
    base = replace(CONFIG, vocab_size=1024)  # `rocm-attn bench` asks by token ids below 1,000
    loaded = tiny_model(context_len=512, dtype=torch.float32, device=cpu, tokenizer=word_tokenizer(), base=base)
    engine = rocm_serve.Engine(loaded, rocm_serve.EngineOptions(max_batch_size=4, max_kv_len=256))
    with running(engine) as server:
        yield re.sub(r"\bsmollm2\b", NAME, text.replace(ADDRESS, server.url.removeprefix("http://")))


def served_until_reported(words: Sequence[str], reader: Reader) -> tuple[int, str]:
    """Runs a server on a port that the kernel chooses, ends it once it listens, and returns its exit code and output.

    words: of `rocm-attn`
    """
    command = [str(reader.python), "-m", "rocm_attn.cli", *words, "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(), stdout=pipe, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        said = ""
        for line in server.stdout:
            said += line
            if "listening on http://127.0.0.1:" in line:
                server.send_signal(signal.SIGTERM)
        return server.wait(), said
