"""The packages that an image's Python must keep, and those that its tests need in addition.

python3 pins.py constraints             the installed torch and Triton, as pip constraints
python3 pins.py built WHEEL             these, and a wheel's requirements in the releases that it was just built with
python3 pins.py requirements EXTRA FILE an extra of a pyproject.toml, without them and without the project itself
"""

from __future__ import annotations

import email.parser
import importlib.metadata
import re
import sys
import zipfile
from collections.abc import Iterator

# The base image brings these; every one of them is built for its ROCm or CUDA release.
OF_THE_BASE = {
    "torch",
    "torchvision",
    "torchaudio",
    "triton",
    "pytorch-triton",
    "pytorch-triton-rocm",
    "triton-rocm",
}


def constraints() -> Iterator[str]:
    """A line for each of them that is installed."""
    for found in importlib.metadata.distributions():
        if _normal(found.metadata["Name"]) in OF_THE_BASE:
            yield f"{found.metadata['Name']}=={found.version}"


def built(wheel: str) -> Iterator[str]:
    """constraints(), and a line for each requirement of a wheel that is installed here, where it was built."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.parser.Parser().parsestr(archive.read(name).decode())
    yield from constraints()
    for requirement in metadata.get_all("Requires-Dist", []):
        found = re.match(r"[\w.-]+", requirement)
        assert found, requirement
        if "extra ==" not in requirement:
            yield f"{found.group()}=={importlib.metadata.version(found.group())}"


def requirements(extra: str, project: dict[str, object]) -> Iterator[str]:
    """The requirements of an extra; project: the table [project] of a pyproject.toml."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    for requirement in extras[extra]:
        found = re.match(r"[\w.-]+", requirement)
        assert found, requirement
        if _normal(found.group()) not in OF_THE_BASE | {project["name"]}:
            yield requirement


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _main(arguments: list[str]) -> None:
    if arguments[0] == "constraints":
        lines = constraints()
    elif arguments[0] == "built":
        lines = built(arguments[1])
    else:
        import tomllib  # from Python 3.11 on; the images have 3.12

        with open(arguments[2], "rb") as file:
            lines = requirements(arguments[1], tomllib.load(file)["project"])
    print("\n".join(sorted(set(lines))))


if __name__ == "__main__":
    _main(sys.argv[1:])
