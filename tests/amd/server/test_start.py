"""`rocm-attn serve` begins with the engine's process, and its own process never imports torch."""

import json
import subprocess
import sys
from pathlib import Path

from rocm_attn.cli import DONE
from rocm_serve.parallel.child_process import SWITCH_SECONDS
from tests.amd.house.source_tree import ROOT
from tests.amd.server.load.model_folder import write_model

# Serves some requests of each kind, and prints which of the libraries are imported at which moment.
SERVING = """
import gc, json, os, signal, sys, threading, urllib.request
from multiprocessing.context import SpawnProcess
import rocm_serve.cli.serve as command
from rocm_attn.cli import main

def say(moment):
    print(json.dumps([moment, [name for name in {libraries} if name in sys.modules]]), flush=True)

def begun(process, start=SpawnProcess.start):
    if process.name == "rocm_attn engine":
        say("begin")
    start(process)

def ask(url):
    try:
        for path in ("/health/truth", "/metrics", "/v1/models"):
            urllib.request.urlopen(url + path).read()
        of_json = {{"Content-Type": "application/json"}}
        for each in ({{"logprobs": 2}}, {{"n": 2, "stop": "w9"}}, {{"stream": True, "seed": 3}}):
            body = json.dumps({{"model": "tiny", "prompt": "w9 w12", "max_tokens": 4, **each}}).encode()
            urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body, of_json)).read()
        assert len(gc.get_objects()) < gc.get_freeze_count() / 2
        assert abs(sys.getswitchinterval() - {switch}) < 1e-6
        say("asked")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)

def announce(line):
    if line.startswith("listening on "):
        threading.Thread(target=ask, args=(line.split()[-1],)).start()

if __name__ == "__main__":
    SpawnProcess.start = begun
    command._announce = announce
    code = main(sys.argv[1:])
    say("end")
    sys.exit(code)
"""
LIBRARIES = ("torch", "numpy", "tokenizers", "jinja2", "fastapi", "pydantic", "uvicorn")


def test_the_engines_process_begins_before_the_servers_imports_which_never_bring_torch_and_it_does_not_pause(
    tmp_path: Path,
) -> None:
    script = tmp_path / "serving.py"
    script.write_text(SERVING.format(libraries=LIBRARIES, switch=SWITCH_SECONDS))
    model = write_model(tmp_path)
    flags = ("--served-model-name", "tiny", "--device", "cpu", "--provider", "torch", "--page-size", "4", "--no-graphs")
    command = [sys.executable, str(script), "serve", "--model", str(model), "--port", "0", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == DONE, done.stderr
    imported = dict(json.loads(line) for line in done.stdout.splitlines())
    assert "asked" in imported, done.stderr
    assert imported["begin"] == []
    assert imported["asked"] == imported["end"]
    assert {"tokenizers", "fastapi", "uvicorn"} <= set(imported["end"])
    assert "torch" not in imported["end"]
