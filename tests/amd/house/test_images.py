"""The images: pinned, scoped, not root, and built from existing parts.

Building them takes a Docker daemon: docker/check_images.sh.
"""

import importlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.amd.house.source_tree import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE = (ROOT / "docker" / "compose.yaml").read_text()
# A stage: its name, its base, and its text.
STAGES = {
    name: (base, text)
    for base, name, text in re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
}


@pytest.mark.parametrize(
    "name",
    [
        *("scripts/test.sh", "scripts/demo.sh", ".ci/run", ".ci/nightly", "docker/run_tests.sh"),
        *("docker/check_images.sh", "docker/ci/rocm.sh", "rocm_lab/benchmarks/on_gpu.sh"),
    ],
)
def test_a_script_goes_to_its_own_checkout_and_to_no_folder_of_cdpath(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    lines = [line for line in (ROOT / name).read_text().splitlines() if 'cd "$(dirname "$0")' in line]
    done = subprocess.run(
        ["bash", "-c", f"{lines[0]}; pwd -P", name],
        cwd=ROOT,
        env={**os.environ, "CDPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{ROOT.resolve()}\n"


def script(name: str) -> dict[str, Any]:
    """Returns the functions of a Python script of the images, by name."""
    return runpy.run_path(str(ROOT / "docker" / name))


def test_base_images_are_pinned_by_digest() -> None:
    images = re.findall(r"^ARG \w*BASE_IMAGE=(\S+)$", DOCKERFILE, re.M)
    assert len(images) == 2
    assert all(re.fullmatch(r"[\w/.:-]+:[\w.-]+@sha256:[0-9a-f]{64}", image) for image in images)


def test_the_image_that_serves_is_not_root_needs_no_tests_and_ends_on_a_signal() -> None:
    base, serve = STAGES["serve"]
    assert base == "runtime"
    assert "COPY" not in serve, "serve is runtime with an entry point"
    assert "HEALTHCHECK" not in DOCKERFILE
    assert re.findall(r"^STOPSIGNAL (\S+)$", serve, re.M) == ["SIGINT"]
    (user,) = re.findall(r"^USER (\S+)$", STAGES["runtime"][1], re.M)
    assert user == "${SERVE_UID}"
    assert re.findall(r"^USER (\S+)$", serve, re.M) == []
    assert "test.sh" not in "".join(text for name, (_, text) in STAGES.items() if name != "ci")


def test_the_images_install_what_tests_need_and_nothing_that_the_base_brings() -> None:
    pins = script("pins.py")
    with open(ROOT / "pyproject.toml", "rb") as file:
        lines = list(pins["requirements"]("dev", tomllib.load(file)["project"]))
    assert any(line.startswith("pytest") for line in lines)
    assert not [line for line in lines if line.startswith(("torch", "triton", "rocm-attn"))]
    kept = list(pins["constraints"]())
    assert f"torch=={torch.__version__}" in kept
    assert all(re.fullmatch(r"[\w-]+==\S+", line) for line in kept)


def test_what_a_wheel_was_built_with_is_what_it_runs_with(tmp_path: Path) -> None:
    requirements = "Requires-Dist: numpy>=1.0\nRequires-Dist: absent; extra == 'all'\nRequires-Dist: pytest"
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as archive:
        archive.writestr("one-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: one\n{requirements}\n")
    lines = list(script("pins.py")["built"](str(tmp_path / "one.whl")))
    assert f"numpy=={metadata.version('numpy')}" in lines
    assert f"pytest=={metadata.version('pytest')}" in lines
    assert f"torch=={torch.__version__}" in lines
    assert not [line for line in lines if line.startswith("absent")]


def test_a_base_whose_torch_is_of_another_kind_or_is_not_pinned_is_refused() -> None:
    verify = script("verify.py")
    assert [verify["built_for"](hip, cuda) for hip, cuda in (("7.2", None), (None, "13.0"), (None, None))] == [
        "rocm",
        "cuda",
        "cpu",
    ]
    faults = verify["faults_of_base"]
    pinned = "torch==2.10.0+rocm7.2.4\ntriton==3.6.0\n"
    assert list(faults("rocm", "rocm", "2.10.0+rocm7.2.4", pinned)) == []
    assert list(faults("cpu", "cpu", "2.13.0+cpu", "torch==2.13.0+cpu\n")) == []
    (wrong,) = faults("rocm", "cpu", "2.13.0+cpu", "torch==2.13.0+cpu\n")
    assert "torch 2.13.0+cpu is built for cpu and the image is to be for rocm" in wrong
    for constraints in ("", "\n", "triton==3.6.0", "torch==2.10.0"):
        (unpinned,) = faults("rocm", "rocm", "2.10.0+rocm7.2.4", constraints)
        assert "is not among the constraints" in unpinned
    (unknown,) = faults("hip", "rocm", "2.10.0+rocm7.2.4", pinned)
    assert "it may be rocm, cuda, cpu" in unknown


def test_torch_is_pinned_to_what_pip_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's torch 2.13.0 says of itself that it is 2.13.0+cu130."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    torch_release = script("verify.py")["torch_release"]
    assert torch_release("2.13.0+cu130") == "2.13.0+cu130", "no distribution"
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    (tmp_path / "torch-2.13.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
    )
    importlib.invalidate_caches()
    assert torch_release("2.13.0+cu130") == "2.13.0"
    assert list(script("pins.py")["constraints"]()) == ["torch==2.13.0"]


WHOLE: Mapping[str, Any] = {
    "torch_for": "rocm",
    "torch_now": "rocm",
    "constraints": ("torch==2.10.0+rocm7.2.4", "pybind11==3.0.4", "pytorch_triton_rocm==3.6.0", "absent==1"),
    "distributions": {
        "torch": "2.10.0+rocm7.2.4",
        "pytorch-triton-rocm": "3.6.0",
        "pybind11": "3.0.4",
        "amd-aiter": "0.1.20",
    },
    "wants_aiter": True,
    "complaints": (),
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch_now": "cuda"}, "the base's torch was built for rocm, the image's is built for cuda"),
        ({"with": {"pybind11": "3.1.0"}}, "pybind11 is 3.1.0 and was to stay 3.0.4"),
        ({"with": {"pytorch-triton-rocm": "3.7.0"}}, "pytorch_triton_rocm is 3.7.0 and was to stay 3.6.0"),
        ({"without": "amd-aiter"}, "AITER was asked for and is not installed"),
        ({"wants_aiter": False}, "amd-aiter 0.1.20 is installed and was not asked for"),
        (
            {"with": {"nvidia-cublas-cu12": "12"}},
            "libraries of CUDA have come with another package: nvidia-cublas-cu12",
        ),
        ({"complaints": ("pandas 3.0 requires tzdata",)}, "pandas 3.0 requires tzdata"),
    ],
)
def test_an_image_in_which_something_was_displaced_is_refused(change: dict[str, Any], said: str) -> None:
    faults = script("verify.py")["faults_of_image"]
    assert list(faults(**WHOLE)) == []
    installed = {**WHOLE["distributions"], **change.get("with", {})}
    installed.pop(change.get("without", ""), None)
    rest = {name: value for name, value in change.items() if name not in ("with", "without")}
    (fault,) = faults(**{**WHOLE, "distributions": installed, **rest})
    assert said in fault


def test_another_aiter_torch_pybind11_or_python_compiles_into_another_folder() -> None:
    contents = script("contents.py")
    folder = contents["cache_folder"]
    installed = {"amd-aiter": "0.1.21.dev3+ge4048607", "torch": "2.10.0+rocm7.2.4", "pybind11": "3.0.4", "numpy": "2.0"}
    one = folder(installed, "3.12.3")
    others = {folder({**installed, name: "9"}, "3.12.3") for name in ("amd-aiter", "torch", "pybind11")}
    assert len({one, *others, folder(installed, "3.12.4")}) == 5
    assert folder({**installed, "numpy": "9"}, "3.12.3") == one
    assert re.fullmatch(r"[\w.+-]+", folder({**installed, "torch": "1 2/3:4"}, "3.12.3"))
    assert folder({"torch": "2.10.0"}, "3.12.3") == ""
    assert list(contents["versions"](installed, {"rocm": "7.2.4", "torch-cuda": ""})) == [
        "amd-aiter 0.1.21.dev3+ge4048607",
        "pybind11 3.0.4",
        "torch 2.10.0+rocm7.2.4",
        "numpy 2.0",
        "rocm 7.2.4",
    ]


def test_the_variants_that_are_compiled_ahead_are_named_by_aiters_own_function() -> None:
    """The test has a function like AITER's in a file that cannot be imported here."""
    source = """
import a_library_that_asks_for_a_gpu
def cmdGenFunc_mha_batch_prefill(q: Tensor, is_causal: bool, logits_soft_cap: float, gen: Generator | None = None):
    name = "_bf16" if q.dtype == dtypes.bf16 else "_fp16" if q.dtype == torch.float16 else "?"
    name += "_mask" if is_causal else "_nmask"
    return {"md_name": name + str(logits_soft_cap > 0), "blob_gen_cmd": [f"{CK_DIR}/generate.py"]}
"""
    ahead = script("build_aiter_variants.py")
    assert ahead["variants"](ahead["naming_function"](source, "/ck")) == [
        {"md_name": f"{dtype}_maskFalse", "blob_gen_cmd": ["/ck/generate.py"]} for dtype in ("_bf16", "_fp16")
    ]


def test_a_release_that_is_not_served_is_refused_before_aiter_is_cloned(tmp_path: Path) -> None:
    (copied,) = re.findall(r"^COPY (.+build_aiter\.sh.*) /opt/rocm-attn/$", STAGES["aiter-build"][1], re.M)
    for pattern in copied.split():
        for path in ROOT.glob(pattern):
            shutil.copy(path, tmp_path)
    environment = {
        "PATH": os.environ["PATH"],
        "PLATFORM": "rocm",
        "INSTALL_AITER": "1",
        "AITER_REPOSITORY": "/nowhere",
        "AITER_COMMIT": "v0.1.12",
        "GPU_ARCHS": "gfx942;gfx950",
    }
    command = ["bash", str(tmp_path / "build_aiter.sh"), str(tmp_path / "wheels")]
    built = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert built.returncode != 0
    assert re.fullmatch(r"AITER v0\.1\.12 is older than v0\.1\.15, the first that is served\n", built.stderr), (
        built.stderr
    )


def argument(name: str) -> str:
    """Returns the default of an argument of the Dockerfile."""
    (value,) = set(re.findall(rf"^ARG {name}=(\S+)$", DOCKERFILE, re.M))
    return str(value)


def test_a_volume_is_named_by_what_compiles_into_it() -> None:
    version = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0]
    rocm, of_torch = re.findall(r":(rocm[\d.]+)_.*_release_([\d.]+)@", argument("BASE_IMAGE"))[0]
    commit = f"${{AITER_COMMIT:-{argument('AITER_COMMIT')}}}"
    cuda_torch = argument("TORCH_REQUIREMENT").replace("==", "")
    assert re.findall(r"^    name: (\S+)$", COMPOSE, re.M) == [
        f"rocm-attn-{version}-{rocm}-torch{of_torch}-aiter-{commit}",
        f"rocm-attn-{version}-cuda-{cuda_torch}",
    ]
    assert f"AITER_COMMIT: {commit}\n" in COMPOSE, "what is built, and what its cache is called"


def test_every_command_of_compose_works_without_a_variable_set() -> None:
    assert set(re.findall(r"\$\{\w+(:?.)", COMPOSE)) == {":-"}, "a variable without a default stops every command"
    (groups,) = re.findall(r"group_add:\n((?: +- .+\n)+)", COMPOSE)
    assert len(groups.splitlines()) == 1, "two groups may be the same one, which compose refuses"
    assert COMPOSE.count("${MODELS:-../models}:/models:ro") == COMPOSE.count(":/models"), "the checkout's models"
    assert "models" in (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()


def ran(command: str, folder: Path = ROOT, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script of docker/ in a checkout to its end, with these variables too."""
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    words = ["bash", *f"docker/{command}".split()]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_stage_that_does_not_exist_is_refused_with_the_list() -> None:
    done = ran("run_tests.sh everything")
    assert done.returncode == 2
    for stage in ("host", "device", "rocm", "rehearsal"):
        assert f"run_tests.sh {stage}" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "run_tests.sh host",
        "check_images.sh",
        *(f"ci/rocm.sh{step}" for step in ("", " before", " build", " test", " after")),
    ],
)
def test_without_an_engine_one_sentence_says_what_to_do(command: str, tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    dead.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    dead.chmod(0o755)
    for docker in (tmp_path / "no-such-command", dead):
        done = ran(command, DOCKER=docker)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(
            f"'{docker} version' fails, so no Docker engine answers on this machine; install or start"
        )
        assert line.endswith("run the tests without an image: bash scripts/test.sh")


@pytest.mark.parametrize(
    ("command", "plugin"),
    [("run_tests.sh host", "buildx"), ("check_images.sh", "buildx"), ("check_images.sh", "compose")],
)
def test_a_plugin_of_docker_that_is_missing_is_named_before_anything_is_built(
    command: str, plugin: str, tmp_path: Path
) -> None:
    docker = fake_docker(tmp_path, f'[ "$1" != {plugin} ]')
    done = ran(command, DOCKER=docker)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"'{docker} {plugin}' is missing; install it: docker-{plugin}-plugin of Docker, or docker-{plugin} of "
        "Debian 13 or later\n"
    )


def fake_docker(folder: Path, body: str) -> Path:
    """Writes a command in Docker's place that answers and records its calls, a line each, in folder/calls."""
    path = folder / "docker"
    path.write_text(f'#!/bin/sh\n[ "$1" != version ] || exit 0\necho "$*" >> "{folder}/calls"\n{body}\n')
    path.chmod(0o755)
    return path


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_a_run_of_tests_that_is_ended_takes_its_container_with_it(tmp_path: Path) -> None:
    """GitHub ends a cancelled job with signals; a container continues without its client."""
    docker = fake_docker(tmp_path, f'[ "$1" != run ] || {{ echo up > "{tmp_path}/up"; exec sleep 600; }}')
    os.mkfifo(tmp_path / "up")
    tests = subprocess.Popen(
        ["bash", "docker/run_tests.sh", "host"],
        cwd=ROOT,
        env={**os.environ, "DOCKER": str(docker), "IMAGE": "an-image", "CONTAINER": "a-name", "PLATFORM": "rocm"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert (tmp_path / "up").read_text() == "up\n"  # waits until the container runs
        tests.send_signal(signal.SIGTERM)
        assert tests.wait() == 143
    finally:
        os.killpg(tests.pid, signal.SIGKILL)  # processes that the container's client has left
    run, removed = calls(tmp_path)
    assert "--init" in run.split()
    assert "--name a-name" in run
    assert run.endswith(" an-image host runner"), "both stages need no GPU"
    assert removed == "rm --force --volumes a-name"


def test_the_rehearsal_needs_no_gpu_and_says_where_its_report_is(tmp_path: Path) -> None:
    name = f"rehearsal-{tmp_path.name}.json"
    written = ROOT / "reports" / name
    docker = fake_docker(tmp_path, f'[ "$1" != run ] || touch "{written}"')
    try:
        done = ran("run_tests.sh rehearsal", DOCKER=docker, IMAGE="an-image", PLATFORM="rocm", REPORT_HOST="a-host")
    finally:
        written.unlink(missing_ok=True)
    assert done.returncode == 0
    assert f"the report: reports/{name}\n" in done.stdout
    run = calls(tmp_path)[0]
    assert run.endswith(" an-image rehearsal")
    assert "--device" not in run
    assert f"--volume {ROOT}/reports:/src/reports --env REPORT_HOST=a-host" in run


def test_files_that_git_ignores_are_in_no_image() -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    kept_out = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()
    # Git looks for a name in every folder, Docker only at the root of the checkout.
    wanted = {name.strip("/") if name.startswith("/") else f"**/{name.strip('/')}" for name in ignored}
    assert wanted - set(kept_out) == set()
    assert (ROOT / "docker" / "Dockerfile.engine.dockerignore").read_text().split() == kept_out


def test_aiter_is_compiled_once_and_taken_from_its_image_ever_after(tmp_path: Path) -> None:
    there = tmp_path / "there"
    docker = fake_docker(tmp_path, f'case "$*" in "image inspect"*) [ -e "{there}" ] ;; esac')
    keys = []
    for options in ("", "", "--build-arg GPU_ARCHS=gfx942"):
        (tmp_path / "calls").write_text("")
        done = ran("run_tests.sh build", DOCKER=docker, AITER_IMAGE="kept", PLATFORM="rocm", BUILD_OPTIONS=options)
        assert done.returncode == 0
        builds = [call for call in calls(tmp_path) if call.startswith("buildx build")]
        targets = [re.findall(r"--target (\S+)", call)[0] for call in builds]
        assert targets == (["ci"] if there.exists() else ["aiter", "ci"])
        (key,) = re.findall(r"--build-context aiter=docker-image://kept:(\w+)", builds[-1])
        if "aiter" in targets:
            assert f"--tag kept:{key} " in builds[0]
        keys.append(key)
        there.touch()
    assert keys[0] == keys[1] != keys[2], "other archs are another AITER"


def test_a_second_check_of_the_images_gives_docker_the_same_files(tmp_path: Path) -> None:
    """Docker then finds the layers of the first one. AITER is a repository with an empty file at each path."""
    aiter, copy = tmp_path / "aiter", tmp_path / "copy"
    shutil.copytree(ROOT / "docker", copy / "docker")
    check = (copy / "docker" / "check_images.sh").read_text()
    (taken,) = re.findall(r'archive "\$commit" \\\n(.+?)\|', check, re.S)
    for path in taken.replace("\\\n", " ").split():
        file = aiter / path if "." in path else aiter / path / "a_file"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    git = ["git", "-C", str(aiter), "-c", "user.name=a", "-c", "user.email=a@invalid"]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    dockerfile = copy / "docker" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace(argument("AITER_COMMIT"), commit))
    # The last argument of a build is its folder.
    sums = 'for folder; do :; done; cd "$folder" && find . -type f | sort | xargs sha256sum'
    docker = fake_docker(tmp_path, f'[ "$1" != build ] || {{ ({sums}) >> "{tmp_path}/sums"; exit 1; }}')
    given = []
    for _ in range(2):
        done = ran("check_images.sh", copy, DOCKER=docker, AITER_SOURCE=aiter)
        assert "FAILED: the stand-in does not build" in done.stderr
        given.append((tmp_path / "sums").read_text().splitlines())
        (tmp_path / "sums").unlink()
    assert any(".pack" in line for line in given[0])
    assert given[0] == given[1]


@pytest.mark.parametrize(("mib", "code"), [(300, 0), (40_000, 1), (None, 1)])
def test_a_gpu_whose_memory_is_held_is_not_tested_on(tmp_path: Path, mib: int | None, code: int) -> None:
    for card, used in ((0, 10), (1, mib)):
        if mib is not None and used is not None:
            device = tmp_path / "class" / "drm" / f"card{card}" / "device"
            device.mkdir(parents=True)
            (device / "mem_info_vram_used").write_text(f"{used << 20}\n")
            (device / "mem_info_vram_total").write_text(f"{196_592 << 20}\n")
    (tmp_path / "class" / "kfd" / "kfd" / "proc" / "4711").mkdir(parents=True)
    done = ran(f"gpu_is_free.sh {tmp_path}")
    assert done.returncode == code
    if mib is None:
        assert "no AMD GPU is listed" in done.stderr
    else:
        assert f"card1: {mib} of 196592 MiB in use" in done.stdout
    assert ("4711" in done.stderr) == (mib == 40_000)
