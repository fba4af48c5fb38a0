"""The installation: every package once, importable anywhere, fast and without side effects to import."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from rocm_attn.cli import BAD_INPUT
from tests.amd.forked import run_forked
from tests.amd.house.source_tree import HOUSES, ROOT, SCRIPTS, files_of, python_files, sources_of
from tests.amd.house.test_docs import code_blocks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Hugging Face's package with the name of a folder of this repository; SGLang needs it.
HF_KERNELS = "kernels==0.17.2"
# Libraries whose types the README's example uses.
LIBRARIES = ("torch", "numpy", "typing_extensions")
# Libraries that torch imports.
BELOW_TORCH = ("torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec")

HOUSE_NAMES = tuple(HOUSES)
# Folder of each distribution's pyproject.toml.
PROJECTS = {"rocm_attn": ".", "rocm_serve": "rocm_serve", "rocm_lab": "rocm_lab"}
# The suffixes of the files in each wheel, modules included.
SUFFIXES = (".py", ".pyi", ".typed", ".json")
# A command of each distribution above the library.
COMMANDS = {
    "rocm_serve": ("generate", "--help"),
    "rocm_lab": ("soak", "--steps", "5", "--device", "cpu"),
}
SMALL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
# Prints the exit code and the output of each command.
RUN_EACH = """
import contextlib, io, json, sys
from rocm_attn.cli import main
answers = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            code = main(command)
        except SystemExit as end:  # of --help
            code = end.code
    answers.append((code, said.getvalue()))
print(json.dumps(answers))
"""
each_house = pytest.mark.parametrize("house", HOUSE_NAMES)


def run_python(code: str, *, path: Path, folder: Path) -> str:
    """Returns the output of code in a fresh interpreter that finds modules in path first and runs in folder."""
    environment = {"PYTHONPATH": str(path), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def pip(*arguments: str) -> None:
    """Runs this interpreter's pip."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def new_interpreter(folder: Path, libraries: Sequence[str]) -> Path:
    """Returns the interpreter of a virtual environment with these libraries of this one's and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for name in libraries:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        place = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
        (site_packages / place.name).symlink_to(place)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the installed part of this tree, so that building leaves no traces in the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in (folder for folders in HOUSES.values() for folder in folders):
        ignored = shutil.ignore_patterns("__pycache__", SCRIPTS)
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    return tree


@pytest.fixture(scope="module")
def wheels(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    dist = tmp_path_factory.mktemp("dist")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(dist)!r})"
    for house in HOUSES:  # as pip does, which would first install setuptools for each
        subprocess.run([sys.executable, "-c", build], cwd=tree / PROJECTS[house], stdout=subprocess.DEVNULL, check=True)
    return {house: next(dist.glob(f"{house}-*.whl")) for house in HOUSES}


@pytest.fixture(scope="module")
def wheel(wheels: dict[str, Path]) -> Path:
    """Returns the library's wheel."""
    return wheels["rocm_attn"]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with only the wheel's content."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-compile", "--target", str(target), str(wheel))
    return target


@each_house
def test_the_package_list_is_the_tree(house: str) -> None:
    with open(ROOT / PROJECTS[house] / "pyproject.toml", "rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    packages = {source.module for source in sources_of(house) if source.is_package} | set(HOUSES[house].values())
    assert Counter(listed) == Counter(packages)


@each_house
def test_every_folder_of_the_package_with_python_in_it_is_a_package(house: str) -> None:
    for folder in HOUSES[house]:
        for path in python_files(ROOT / folder):
            assert path.parent == ROOT / folder or (path.parent / "__init__.py").exists(), path


@each_house
def test_the_wheel_holds_every_module_and_its_data_once_and_nothing_else(house: str, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[house]) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    expected = {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in HOUSES[house].items()
        for path in files_of(ROOT / folder, *SUFFIXES)
    }
    assert Counter(names) == Counter(expected)


@each_house
def test_the_wheels_description_has_no_link_that_leads_nowhere(house: str, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[house]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert [link for link in links if not link.startswith("https://")] == []
    assert re.search(r"^Summary: \S", metadata, re.MULTILINE)
    assert ("A checkout has the documentation" in metadata) == (house == "rocm_attn")


# By day tests/amd/house/test_import_rules.py has that the engine needs nothing of the laboratory.
@pytest.mark.parametrize(
    "houses", [HOUSE_NAMES[:1], pytest.param(HOUSE_NAMES[:2], marks=pytest.mark.nightly), HOUSE_NAMES[:3]]
)
def test_each_wheel_works_with_those_below_it_alone(
    houses: Sequence[str], wheels: dict[str, Path], tmp_path: Path
) -> None:
    """The command line of fresh environments: a command runs where its wheel is, and elsewhere a sentence names it."""
    python = new_interpreter(tmp_path / "venv", [*LIBRARIES, *BELOW_TORCH])
    for house in houses:
        with zipfile.ZipFile(wheels[house]) as archive:
            archive.extractall(next(python.parents[1].glob("lib/python*/site-packages")))
    (tmp_path / "config.json").write_text(json.dumps(SMALL_CONFIG))
    commands = [("explain", "config.json", "--arch", "gfx942", "--provider", "triton"), ("guards",), *COMMANDS.values()]
    # A safeguard of pages that an engine wrote, so that the random steps of `soak` find nothing without it.
    environment = {"HOME": str(tmp_path), "ROCM_ATTN_DEBUG": "1", "ROCM_ATTN_DISABLE_GUARDS": "page_format"}
    command = [str(python), "-Ic", RUN_EACH, json.dumps(commands)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (_, explained), (_, guards), *answers = json.loads(done.stdout)
    assert "triton.decode" in explained
    assert ("OFF" in guards) == ("rocm_lab" in houses), guards
    for house, (code, said) in zip(COMMANDS, answers, strict=True):
        if house in houses:
            assert code == 0, said
        else:
            distribution = house.replace("_", "-")
            assert code == BAD_INPUT
            assert f"a command of {distribution}, which is not installed; run in a checkout of rocm_attn" in said


@pytest.mark.nightly
@pytest.mark.parametrize("published", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_hugging_face_kernels_and_ours_import_side_by_side(
    published: bool, installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both import from the root of the checkout too, where Python finds a folder called kernels first.

    published: their package as pip installs it, or a package of the same name and version.
    """
    target = tmp_path_factory.mktemp("hf_kernels")
    if published:
        pip("install", "--no-deps", "--target", str(target), HF_KERNELS)
    else:
        (target / "kernels").mkdir()
        (target / "kernels" / "__init__.py").write_text(f"__version__ = '{HF_KERNELS.partition('==')[2]}'\n")
    code = (
        "import kernels, rocm_attn.kernels.launch as launch, rocm_attn;"
        "print(kernels.__version__, kernels.__file__, launch.__file__, sep='\\n')"
    )
    shutil.copytree(installed, target, dirs_exist_ok=True)
    for path, folder in ((target, installed.parent), (target, ROOT)):
        version, theirs, ours = run_python(code, path=path, folder=folder).splitlines()
        assert version == HF_KERNELS.partition("==")[2]
        assert Path(theirs).is_relative_to(target)
        assert Path(ours).as_posix().endswith("kernels/launch.py")
        assert Path(ours) != Path(theirs).parent / "launch.py"


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "reads_libraries"), [("wheel", False), ("wheel", True), ("editable", True)])
def test_type_checkers_read_a_wheel_and_an_editable_install_as_they_come(
    kind: str, reads_libraries: bool, tree: Path, wheel: Path, tmp_path: Path
) -> None:
    """mypy --strict passes the README's example, and finds the mistakes of a file next to it.

    reads_libraries: true if torch's types are read too, which takes most of the time.
    """
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n" + "[mypy-torch.*]\nfollow_imports = skip\n" * (not reads_libraries))
    (tmp_path / "example.py").write_text(*code_blocks("python"))
    (tmp_path / "wrong.py").write_text("import rocm_attn as ra\n\nra.StepBatch(1, [1], [1])\nra.Pages\n")
    python = new_interpreter(tmp_path / kind, LIBRARIES)
    options = ["--editable", str(tree)] if kind == "editable" else [str(wheel)]
    pip("--python", str(python), "install", "--no-deps", "--no-compile", *options)
    where = "import importlib.util as u; print(u.find_spec('rocm_attn.kernels.launch').origin)"
    found = subprocess.run([python, "-Ic", where], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(tree if kind == "editable" else tmp_path / kind)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    command += ["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), "example.py", "wrong.py"]
    checked = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    errors = re.findall(r"^(\w+\.py:\d+): error: .*\[([\w-]+)\]$", checked.stdout, re.MULTILINE)
    assert errors == [("wrong.py:3", "arg-type"), ("wrong.py:4", "attr-defined")], checked.stdout + checked.stderr


_IMPORTS = """
import importlib, pkgutil, sys, torch
for name in [name for name in sys.modules if name.partition(".")[0] in ("rocm_attn", "rocm_serve")]:
    del sys.modules[name]
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")
before = set(sys.modules)
import rocm_attn
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert loaded - set(sys.stdlib_module_names) == {"rocm_attn"}, loaded
ENGINES = "vllm", "sglang"
count = 0
for module in pkgutil.walk_packages(rocm_attn.__path__, "rocm_attn."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        count += 1
    except ModuleNotFoundError as missing:
        if missing.name.split(".")[0] not in ENGINES:
            raise
from rocm_attn.batch.inputs import ON_HOST
assert ON_HOST.device.type == "cpu"
assert not torch.cuda.is_initialized()
print(count)
"""


def test_every_module_can_be_imported_where_an_engine_has_set_another_dtype_and_device() -> None:
    """vLLM imports a backend while it builds a model in bfloat16, in a device's context.

    The package itself takes torch and no other library, and no module touches a GPU.
    """
    done = run_forked(_IMPORTS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 150
