"""Ids of Hugging Face's hub in place of paths: the cache is asked first, then HF_ENDPOINT, a server here."""

import hashlib
import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rocm_attn.cli import BAD_INPUT, DONE
from rocm_attn.models.hub import is_hub_id
from tests.amd.forked import run_forked
from tests.amd.server.load.model_folder import write_model

ID = "owner/tiny-model"
COMMIT = "c" * 40
EXPLAIN = ("explain", ID, "--arch", "gfx942", "--json")
GENERATE = ("generate", "--model", ID, "--device", "cpu", "--raw", "--max-new-tokens", "2", "--json", "w1 w2")
BOTH = f"""
assert main({EXPLAIN}) == 0
print("--", *sorted(path.name for path in Path("hub").glob("models--*/snapshots/*/*")), "--")
sys.exit(main({GENERATE}))
"""
# The hub's library reads the environment when it is imported, which is later.
IN_A_HOME = """
import os, sys
from pathlib import Path
os.environ |= {{"HF_HOME": {home!r}, "HF_ENDPOINT": {url!r}, "HF_HUB_DISABLE_XET": "1"}}
os.chdir({home!r})
from rocm_attn.cli import main
"""


@dataclass
class Hub:
    """A server that has one model, and where a process finds it. asked: the paths of all requests"""

    files: Path
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def run(self, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
        """Runs a command in a process whose cache is in `home` and whose hub is this server."""
        return self._python(f"sys.exit(main({arguments}))", home)

    def described_and_served(self, home: Path) -> list[str]:
        """Runs `explain` and then `generate` in one process. Returns the files in the cache between the two."""
        done = self._python(BOTH, home)
        assert done.returncode == DONE, done.stderr
        explained, cached, generated = done.stdout.split("--")
        assert json.loads(explained)["layer_kinds"]
        assert len(json.loads(generated)["results"][0]["token_ids"]) == 2
        return cached.split()

    def _python(self, code: str, home: Path) -> subprocess.CompletedProcess[str]:
        return run_forked(IN_A_HOME.format(home=str(home), url=self.url) + code)

    def reply(self, path: str) -> tuple[int, bytes]:
        """The status and the body for a path."""
        self.asked.append(path)
        if path == f"/api/models/{ID}/revision/main":
            described = {"id": ID, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.names()]}
            return 200, json.dumps(described).encode()
        if path == f"/api/models/{ID}/tree/{COMMIT}":
            sizes = {name: (self.files / name).stat().st_size for name in self.names()}
            tree = [
                {"type": "file", "path": name, "size": size, "oid": digest(self.files / name)}
                for name, size in sizes.items()
            ]
            return 200, json.dumps(tree).encode()
        for revision in ("main", COMMIT):
            name = path.removeprefix(f"/{ID}/resolve/{revision}/")
            if name in self.names():
                return 200, (self.files / name).read_bytes()
        return 404, b"{}"

    def names(self) -> list[str]:
        """The model's files."""
        return sorted(path.name for path in self.files.iterdir())


def digest(path: Path) -> str:
    """Returns what the hub calls a file's content by."""
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "files"
    folder.mkdir()
    write_model(folder)
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            status, body = hub.reply(path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *of_format: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Returns an empty home of the hub's cache."""
    place = tmp_path / "home"
    place.mkdir()
    return place


def put_into_cache(files: Path, home: Path) -> None:
    """Writes a cache as huggingface_hub lays it out, by hand."""
    model = home / "hub" / f"models--{ID.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for path in files.iterdir():
        (snapshot / path.name).write_bytes(path.read_bytes())


def test_a_model_in_the_cache_is_served_and_nothing_is_asked(hub: Hub, home: Path) -> None:
    put_into_cache(hub.files, home)
    assert hub.described_and_served(home) == hub.names()
    assert hub.asked == []


def test_an_id_that_is_in_no_cache_is_downloaded_and_a_description_takes_its_config_alone(hub: Hub, home: Path) -> None:
    assert hub.described_and_served(home) == ["config.json"], "generate begins with a part of the model"
    assert any(path.endswith("/model.safetensors") for path in hub.asked)


@pytest.mark.parametrize("name", ["owner/other", "models/llama--8b"])
@pytest.mark.parametrize(
    "command",
    [("explain", "--arch", "gfx942"), pytest.param(("generate", "x", "--model"), marks=pytest.mark.nightly)],
)
def test_a_name_that_is_no_model_of_the_hub_names_the_command_that_downloads(
    command: tuple[str, ...], name: str, hub: Hub, home: Path
) -> None:
    done = hub.run(*command, name, home=home)
    assert done.returncode == BAD_INPUT
    *_, sentence = done.stderr.splitlines()
    assert sentence.startswith(f"rocm-attn: there is no file or directory {name}, and Hugging Face's hub did not")
    assert sentence.endswith(f"run: hf download {name}, or give a directory")
    assert "Traceback" not in done.stderr


def test_a_path_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("owner/name")
    for path in ("./owner/name", "/owner/name", "name", "a/b/c", "../name", "~/name", "owner/"):
        assert not is_hub_id(path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert not is_hub_id("owner/name")
