"""The conditions that an image must meet, checked while it is built.

python3 verify.py base BUILT_FOR            torch is built for rocm, cuda or cpu, and its release is pinned
python3 verify.py image PLATFORM AITER      nothing has displaced it since; AITER (1 or 0) is there or is not
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = Path("/opt/rocm-attn")
_KINDS = ("rocm", "cuda", "cpu")


def built_for(hip: str | None, cuda: str | None) -> str:
    """Returns the platform that torch is built for; hip, cuda: torch.version's."""
    return "rocm" if hip else "cuda" if cuda else "cpu"


def torch_release(said: str) -> str:
    """Returns torch's release as pip has it: PyPI's lacks the +cu130 of torch.__version__, which is given as said."""
    return next((found.version for found in importlib.metadata.distributions(name="torch")), said)


def faults_of_base(wanted: str, found: str, torch_version: str, constraints: str) -> Iterator[str]:
    """Yields the faults of a base. constraints: text of the file that pins its torch."""
    if wanted not in _KINDS:
        yield f"TORCH_FOR is {wanted!r}; it may be {', '.join(_KINDS)}"
    elif wanted != found:
        yield (
            f"torch {torch_version} is built for {found} and the image is to be for {wanted}: take a base with the "
            "right torch, or say TORCH_FOR=cpu for one that only stands in"
        )
    if f"torch=={torch_version}" not in constraints.split():
        yield f"torch {torch_version} is not among the constraints, so pip would put another in its place"


def faults_of_image(
    *,
    torch_for: str,
    torch_now: str,
    constraints: Iterable[str],
    distributions: dict[str, str],
    wants_aiter: bool,
    complaints: Iterable[str],
) -> Iterator[str]:
    """Yields the faults of an image.

    torch_for, torch_now: the platform that the base's torch was built for, and the one that torch is built for now
    constraints:          lines name==version
    distributions:        name -> version of each installed distribution
    complaints:           of pip check, that the base did not have
    """
    if torch_for != torch_now:
        yield f"the base's torch was built for {torch_for}, the image's is built for {torch_now}"
    for line in constraints:
        name, _, version = line.partition("==")
        found = distributions.get(_normal(name))
        if found not in (None, version):
            yield f"{name} is {found} and was to stay {version}"
    has_aiter = "amd-aiter" in distributions
    if wants_aiter and not has_aiter:
        yield "AITER was asked for and is not installed; say INSTALL_AITER=0 to go without"
    if has_aiter and not wants_aiter:
        yield f"amd-aiter {distributions['amd-aiter']} is installed and was not asked for"
    if torch_for != "cuda":
        of_cuda = sorted(name for name in distributions if name.startswith("nvidia-"))
        if of_cuda:
            yield f"libraries of CUDA have come with another package: {', '.join(of_cuda)}"
    yield from complaints


def pip_complaints() -> list[str]:
    """Returns the requirements that pip finds unsatisfied among the installed packages."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode and not lines:
        raise SystemExit(f"pip check failed: {done.stderr.strip()}")
    return lines if done.returncode else []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _main(arguments: list[str]) -> None:
    import torch

    found = built_for(torch.version.hip, torch.version.cuda)
    constraints = (FOLDER / "constraints.txt").read_text()
    if arguments[0] == "base":
        faults = list(faults_of_base(arguments[1], found, torch_release(str(torch.__version__)), constraints))
        # A base may have its own complaints; only new ones are the image's fault.
        (FOLDER / "base.json").write_text(json.dumps({"torch_for": found, "complaints": pip_complaints()}))
    else:
        base = json.loads((FOLDER / "base.json").read_text())
        faults = list(
            faults_of_image(
                torch_for=base["torch_for"],
                torch_now=found,
                constraints=constraints.split(),
                distributions={_normal(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()},
                wants_aiter=arguments[1:] == ["rocm", "1"],
                complaints=[line for line in pip_complaints() if line not in base["complaints"]],
            )
        )
    if faults:
        raise SystemExit("\n".join(f"this image must not be: {fault}" for fault in faults))


if __name__ == "__main__":
    _main(sys.argv[1:])
