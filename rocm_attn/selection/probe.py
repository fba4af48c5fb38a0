"""The probe: compares some kernels with the reference, at the model's shape, before they serve (KernelEntry.is_probed).

These are kernels of other libraries, which may be built without a variant, or with a wrong one, and show it only in
their results; and kernels of this project for which a plainer one can serve, and that no GPU of their arch has run. The
probe runs whole steps of small runtimes (probe_runs.py). Verdicts are kept on disk by arch, versions and code, so that
later processes do not repeat it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from rocm_attn.machine import releases
from rocm_attn.machine.measured_choices import user_cache
from rocm_attn.machine.whole_files import whole_file
from rocm_attn.providers.select import Selection
from rocm_attn.selection.arithmetic import code_digest
from rocm_attn.selection.probe_runs import ALL_OF_IT, FailedProbe, edge_run, outcome, random_run, selected_run

Run = Callable[[Selection, torch.device], FailedProbe | None]


def wrong_kernels(selections: Sequence[Selection], device: torch.device) -> Mapping[str, str]:
    """Name of a probed kernel -> why it must not be used, for the wrong kernels among the selections.

    Every kernel runs on the device, unless a verdict for it is on disk. An exception of a kernel counts as its fault,
    except KeyboardInterrupt.
    """
    wrong: dict[str, str] = {}
    for selection in selections:
        runs = _runs_of(selection, device)
        if runs:
            wrong.update(_verdict(selection, device, runs))
    return wrong


def _runs_of(selection: Selection, device: torch.device) -> Sequence[Run]:
    """The runs that the selection's probed kernels need."""
    entries = [kernel.entry for kernel in selection.kernels.values()]
    over_all_keys = any(entry.is_probed and _runs(entry.provider, device) for entry in entries)
    return [random_run, edge_run] * over_all_keys + [selected_run] * _runs(_selecting_provider(selection), device)


def _selecting_provider(selection: Selection) -> str:
    """The provider of its attention over a selection, if that is probed; else nothing."""
    sparse = selection.sparse
    return sparse.entries[0].partition(".")[0] if sparse is not None and sparse.entry.is_probed else ""


def _runs(provider: str, device: torch.device) -> bool:
    """True if they run on the device: this project's, for a GPU that is not here, are only compiled (prewarm)."""
    return provider == "aiter" or (bool(provider) and device.type == "cuda")


def _verdict(selection: Selection, device: torch.device, runs: Sequence[Run]) -> Mapping[str, str]:
    place = _place(selection, device)
    kept = None if place is None else _read(place)
    if kept is not None:
        return kept
    found = (outcome(run, selection, device) for run in runs)
    wrong = next((each for each in found if each is not None), None)
    verdict = {} if wrong is None else {wrong.kernel: f"switched off by its probe: {wrong.what}"}
    # Memory that is short now may be free later, so that verdict is not kept.
    if place is not None and not (wrong is not None and wrong.lacks_memory):
        _write(place, verdict)
    return verdict


def _place(selection: Selection, device: torch.device) -> Path | None:
    """The file of a selection's verdict; None if kernels are AITER's, of an unknown version that may change."""
    version = releases.aiter_version()
    providers = {_selecting_provider(selection), *(kernel.entry.provider for kernel in selection.kernels.values())}
    if not version and "aiter" in providers:
        return None
    facts = {
        "arch": selection.target.arch,
        "compute_units": selection.target.compute_units,
        "device": device.type,
        "aiter": version,
        "switches": selection.target.releases.switches,
        "rocm": str(selection.target.releases.rocm),
        "triton": releases.triton_version(),
        "torch": torch.__version__,
        "kernels": sorted(kernel.bound.describe() for kernel in selection.kernels.values()),
        "probe": ALL_OF_IT,
        "code": code_digest(),
    }
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return user_cache() / "probes" / f"{name}.json"


def _read(place: Path) -> Mapping[str, str] | None:
    """The verdict that is kept in a file. None if there is none that this user can read; the probe then runs again."""
    try:
        verdict = json.loads(place.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    is_verdict = isinstance(verdict, dict) and all(isinstance(why, str) for why in verdict.values())
    return verdict if is_verdict else None


def _write(place: Path, wrong: Mapping[str, str]) -> None:
    """Keeps a verdict, whole or not at all. If the disk cannot be written, the next process probes again."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(place) as part:
            part.write_text(json.dumps(dict(wrong)))
    except OSError:
        return
