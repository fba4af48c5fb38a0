"""Releases of engines that were not tested: their interfaces are compared, and a plug-in serves, warns or refuses."""

import json
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rocm_attn.errors import Unsupported
from rocm_attn.integrations import interfaces
from rocm_attn.integrations.engine_tree import Tree
from rocm_attn.integrations.interfaces import Interfaces, compare, main, record, recorded, release, used
from rocm_attn.integrations.plugins import PLUGINS, VLLM, Plugin
from rocm_attn.machine.settings import UNTESTED_ENGINES, Settings, read_settings

each_plugin = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
ON = Settings()

# A plug-in, and an engine that must not run.
OURS = """
import vllm.switches
from vllm.backend import Backend
from vllm.calls import layers, size_of
from vllm.config import Config

HOOK = "vllm.runner.Runner.step"

class Ours(Backend[int]):
    def __init__(self, config):
        super().__init__(config)

    def forward(self, query, metadata):
        return layers(self.config), size_of(query).width, metadata.lengths, self.config.parallel.size, Config

    decode = extend = forward

def is_on():
    return vllm.switches.IS_ON
"""
ENGINE = {
    "__init__.py": "raise RuntimeError('the engine runs')\n",
    "switches.py": "from vllm.config import Config as config\nIS_ON: bool = False\nOTHER: bool = False\n",
    "config/__init__.py": "from .all import Config\n",
    "config/all.py": "class Parallel:\n    size: int\n    unused: int\n\nclass Config:\n    parallel: Parallel\n",
    "calls.py": """
class Size:
    @property
    def width(self):
        return 1

def layers(config, kind=None):
    return []

def size_of(query) -> Size:
    return Size()
""",
    "backend.py": """
from abc import ABC, abstractmethod
from vllm.config import Config

class Metadata:
    lengths: list[int]

class Base(ABC):
    @abstractmethod
    def forward(self, query, metadata: "Metadata"): ...

class Backend(Base):
    def __init__(self, config: Config):
        self.config = config

    def extend(self, query): ...

    def unused(self, query): ...
""",
    "runner.py": "class Runner:\n    def step(self, tokens, *, graph=True): ...\n    def unused(self): ...\n",
}
GONE = "is gone"


def engine(folder: Path) -> Path:
    for name, text in ENGINE.items():
        file = folder / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "vllm"


@pytest.fixture
def tested(tmp_path: Path) -> Interfaces:
    """The interfaces of the engine as it was tested."""
    ours = tmp_path / "ours" / "vllm"
    ours.mkdir(parents=True)
    (ours / "backend.py").write_text(OURS)
    engine(tmp_path / "tested")
    return record(used("vllm", tmp_path / "ours"), Tree(tmp_path / "tested"))


def edit(package: Path, file: str, before: str, after: str) -> None:
    text = (package / file).read_text()
    assert before in text
    (package / file).write_text(text.replace(before, after))


def test_the_interfaces_are_those_that_our_source_names_and_no_others(tested: Interfaces) -> None:
    assert tested == {
        "vllm.backend.Backend": ["base class"],
        "vllm.backend.Backend.__init__": ["function", "self", "config"],
        "vllm.backend.Backend.config": ["value"],
        "vllm.backend.Backend.extend": ["function", "self", "query"],
        "vllm.backend.Backend.forward": ["function", "self", "query", "metadata"],
        "vllm.backend.Backend.forward.metadata.lengths": ["field", "list[int]"],
        "vllm.calls.layers": ["function", "config", "kind=None"],
        "vllm.calls.size_of": ["function", "query"],
        "vllm.calls.size_of.width": ["property"],
        "vllm.config.Config": ["class"],
        "vllm.config.Config.parallel": ["field", "Parallel"],
        "vllm.config.Config.parallel.size": ["field", "int"],
        "vllm.runner.Runner.step": ["function", "self", "tokens", "*", "graph=True"],
        "vllm.switches": ["module"],
        "vllm.switches.IS_ON": ["field", "bool"],
    }


@pytest.mark.parametrize(
    ("file", "before", "after", "sentence"),
    [
        ("switches.py", "IS_ON", "IS_OFF", f"vllm.switches.IS_ON {GONE}"),
        ("config/all.py", "    size:", "    ranks:", f"vllm.config.Config.parallel.size {GONE}"),
        ("config/all.py", "size: int", "size: str", "parallel.size was a field of type int and is a field of type str"),
        ("config/all.py", "class Config:", "class Settings:", f"vllm.config.Config {GONE}"),
        ("calls.py", "def width", "def breadth", f"vllm.calls.size_of.width {GONE}"),
        ("calls.py", "    @property\n", "", "vllm.calls.size_of.width was a property and is a function"),
        ("calls.py", "config, kind", "config, device, kind", "vllm.calls.layers got device"),
        ("calls.py", "kind=None", "kind=0", "vllm.calls.layers lost kind=None and got kind=0"),
        ("backend.py", "query, metadata", "query, key, metadata", "vllm.backend.Backend.forward got key"),
        ("backend.py", "query, metadata", "metadata, query", "forward takes its parameters in another order"),
        ("backend.py", '"Metadata"', '"Metadata", out=None', "vllm.backend.Backend.forward got out=None"),
        ("backend.py", "lengths", "seq_lens", f"vllm.backend.Backend.forward.metadata.lengths {GONE}"),
        (
            "backend.py",
            "    def unused",
            "    @abstractmethod\n    def unused",
            "vllm.backend.Backend.unused is new, and every backend must define it",
        ),
        ("backend.py", "class Backend(Base):", "class Renamed(Base):", f"vllm.backend.Backend {GONE}"),
        ("runner.py", "graph=True", "graphs=True", "vllm.runner.Runner.step lost graph=True and got graphs=True"),
        ("runner.py", "graph=True", "graph=True, device", "vllm.runner.Runner.step got device"),
        ("runner.py", "class Runner", "class Other", f"vllm.runner.Runner.step {GONE}"),
    ],
)
def test_a_change_of_something_that_is_used_is_one_sentence(
    file: str, before: str, after: str, sentence: str, tested: Interfaces, tmp_path: Path
) -> None:
    edit(engine(tmp_path / "next"), file, before, after)
    (change,) = compare(tested, Tree(tmp_path / "next"))
    assert change.endswith(sentence)
    assert change.startswith("vllm.")


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("switches.py", "OTHER", "ANOTHER"),
        ("config/all.py", "    unused: int\n", "    more: str\n"),
        ("config/all.py", "class Config:", "class Old:\n    pass\n\nclass Config(Old):"),
        ("config/__init__.py", "from .all import", "from vllm.config.all import"),
        ("calls.py", "kind=None", "kind=None, device=None"),
        ("calls.py", "    @property\n    def width(self):\n        return 1\n", "    width: int = 1\n"),
        ("backend.py", "    def unused(self, query)", "    def other(self)"),
        ("runner.py", "    def unused(self): ...\n", ""),
    ],
)
def test_a_change_that_nothing_of_ours_notices_is_none(
    file: str, before: str, after: str, tested: Interfaces, tmp_path: Path
) -> None:
    edit(engine(tmp_path / "next"), file, before, after)
    assert compare(tested, Tree(tmp_path / "next")) == []


@each_plugin
def test_the_recorded_interfaces_are_of_the_newest_tested_release_and_have_all_that_our_source_imports(
    plugin: Plugin,
) -> None:
    assert release(plugin.name) == plugin.checked[-1].version
    interfaces, uses = recorded(plugin.name), used(plugin.name)
    again = f"record them again: python -m rocm_attn.integrations.interfaces record {plugin.name} FOLDER"
    assert uses.paths <= {*interfaces}, again
    assert {path for path, each in interfaces.items() if each == ["base class"]} == uses.bases, again


@pytest.fixture
def imported(tested: Interfaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Behaves as if a later vLLM were imported, and the tested one were the made-up one. Returns its folder."""
    package = engine(tmp_path / "next")
    file = tmp_path / "vllm_interfaces.json"
    file.write_text(json.dumps({"release": "98.0.0", "interfaces": tested}))
    monkeypatch.setattr(interfaces, "data", lambda engine: file)
    module = ModuleType("vllm")
    module.__version__, module.__path__ = "99.0.0", [str(package)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return package


def test_a_later_release_that_changed_nothing_is_served_with_one_warning(
    imported: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_attn.integrations.plugins._SAID", set())
    caplog.set_level(logging.INFO)
    for _ in range(3):
        VLLM.require_served(ON)
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert "was not tested with vLLM 99.0.0" in line.getMessage()
    assert f"nothing that it uses has changed since {VLLM.checked[-1].version}" in line.getMessage()


def test_a_later_release_that_changed_something_is_refused_with_the_first_changes_and_the_way_around(
    imported: Path,
) -> None:
    for name in ("switches.py", "calls.py", "runner.py"):
        (imported / name).unlink()
    with pytest.raises(Unsupported, match=f"set {UNTESTED_ENGINES}=1") as refused:
        VLLM.require_served(ON)
    sentence = str(refused.value)
    assert "does not serve vLLM 99.0.0" in sentence
    assert "vllm.calls.layers is gone, vllm.calls.size_of is gone, vllm.runner.Runner.step is gone" in sentence
    assert "and 1 more" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("version", ["99.0.0", "0.1.0", "unknown"])
def test_a_setting_serves_any_release_with_a_warning_that_says_why_it_may_not_work(
    version: str, imported: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_attn.integrations.plugins._SAID", set())
    monkeypatch.setattr(VLLM.__class__, "version", lambda plugin: version)
    (imported / "runner.py").unlink()
    with pytest.raises(Unsupported):
        VLLM.require_served(ON)
    VLLM.require_served(read_settings({UNTESTED_ENGINES: "1"}))
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert f"vLLM {version}" in line.getMessage()
    assert ("vllm.runner.Runner.step is gone" in line.getMessage()) == (version == "99.0.0")


def test_files_that_cannot_be_read_are_a_reason_to_refuse(imported: Path) -> None:
    (imported / "calls.py").write_text("def layers(:\n")
    assert "cannot be read (SyntaxError" in VLLM.refusal(ON)


def test_the_script_compares_and_its_status_says_whether_anything_changed(
    imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "vllm", str(imported.parent)]) == 0
    assert "nothing that rocm_attn uses has changed since 98.0.0" in capsys.readouterr().out
    (imported / "runner.py").unlink()
    assert main(["compare", "vllm", str(imported.parent)]) == 1
    assert capsys.readouterr().out == "vllm.runner.Runner.step is gone\n"
    with pytest.raises(SystemExit):
        main(["compare", "vllm", str(imported)])
    assert "has no package vllm" in capsys.readouterr().err


def test_the_script_records_a_release_that_has_all_that_our_source_imports(
    imported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = interfaces.data("vllm").read_text()
    with pytest.raises(SystemExit):
        main(["record", "vllm", str(imported.parent)])
    assert "has 0 dist-info of vllm" in capsys.readouterr().err
    information = imported.parent / "vllm-99.0.0+cpu.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 99.0.0+cpu\n")
    with pytest.raises(SystemExit):  # the made-up engine has nothing that the real plug-in imports
        main(["record", "vllm", str(imported.parent)])
    assert "vllm 99.0.0+cpu does not have vllm." in capsys.readouterr().err
    assert interfaces.data("vllm").read_text() == before
    ours = imported.parent.parent / "ours"
    monkeypatch.setattr(interfaces, "used", lambda engine: used(engine, ours))
    assert main(["record", "vllm", str(imported.parent)]) == 0
    assert recorded("vllm") == json.loads(before)["interfaces"]
    assert release("vllm") == "99.0.0"
    lines = interfaces.data("vllm").read_text().splitlines()
    assert '  "vllm.calls.layers": ["function", "config", "kind=None"],' in lines, "an interface is a line"
