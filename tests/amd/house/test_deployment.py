"""Compose profiles, the Kubernetes manifest, CI on a user's GPU, and the gateway, against the server's own options."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rocm_attn.cli.parser import build_parser
from rocm_attn.integrations.plugins import SGLANG, VLLM, Plugin
from rocm_attn.machine.releases import Release
from rocm_serve.server import run as server_run
from rocm_serve.server.options import ServerOptions
from tests.amd.house.source_tree import ROOT
from tests.amd.house.test_images import argument, calls, fake_docker

DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
MANIFEST = [each for each in yaml.safe_load_all((DOCKER / "kubernetes" / "server.yaml").read_text()) if each]
BY_KIND = {each["kind"]: each for each in MANIFEST}
POD = BY_KIND["StatefulSet"]["spec"]["template"]
WORKFLOWS = (DOCKER / "ci" / "rocm.yml", ROOT / ".github" / "workflows" / "ci.yml")
STEPS = ("before", "build", "test", "after", "emulator")
GATEWAY = (DOCKER / "gateway" / "run.sh").read_text()


def served(arguments: list[str]) -> Any:
    """Returns the parsed options of a `rocm-attn` command line, with variables at their defaults."""
    return build_parser().parse_args([re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", each) for each in arguments])


def seconds(text: str) -> int:
    """Returns the seconds of compose's 60s and 2m."""
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def needed_to_stop(options: Any) -> float:
    """Returns the time of the drain, twice the last bytes of answers, and a slow end of the engine thread or ranks."""
    return float(options.drain_seconds) + 2 * server_run._LAST_BYTES_SECONDS + 5


# Compose


def test_the_server_of_compose_is_reported_what_it_knows_and_has_the_time_to_drain() -> None:
    server = SERVICES["server"]
    options = served(server["command"])
    assert (options.host, options.port, options.allow_anonymous) == ("0.0.0.0", 8000, False)
    assert "ROCM_ATTN_API_KEYS" in server["environment"], "it refuses to listen there without a key"
    assert seconds(server["stop_grace_period"]) >= needed_to_stop(options)
    assert server["read_only"]
    assert server["cap_drop"] == ["ALL"]
    assert "/health" in server["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", ["server", "vllm", "sglang"])
def test_what_serves_is_published_on_loopback_alone_with_the_gpu_and_a_cache(name: str) -> None:
    service = SERVICES[name]
    assert service["ports"] == ["127.0.0.1:${PORT:-8000}:8000"]
    assert service["devices"] == ["/dev/kfd", "/dev/dri"]
    assert service["ipc"] == "host"
    assert service["profiles"] == [name]
    assert any(volume.endswith(":/cache") for volume in service["volumes"])
    assert service["healthcheck"]["start_period"] == "30m", "graphs are made before it listens"


@pytest.mark.parametrize(
    ("name", "plugin", "flag", "tensor_parallel"),
    [
        ("vllm", VLLM, "--attention-backend=CUSTOM", "--tensor-parallel-size=${TP:-8}"),
        ("sglang", SGLANG, "--attention-backend=rocm_attn", "--tp=${TP:-8}"),
    ],
)
def test_an_engine_is_of_a_served_release_and_takes_our_backend_on_eight_gpus(
    name: str, plugin: Plugin, flag: str, tensor_parallel: str
) -> None:
    service = SERVICES[name]
    (release,) = re.findall(r":v([\d.]+)", service["build"]["args"]["ENGINE_IMAGE"])
    assert Release.of(plugin.checked[0].version) <= Release.of(release) < Release(plugin.before)
    assert {flag, tensor_parallel} <= set(service["command"])
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert flag.replace("=", " ") in page


@pytest.mark.parametrize(
    ("schema", "files"),
    [("vendor.compose-spec", (DOCKER / "compose.yaml",)), ("vendor.github-workflows", WORKFLOWS)],
)
def test_files_are_as_their_schemas_say(schema: str, files: tuple[Path, ...]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# Kubernetes


@pytest.mark.parametrize("part", MANIFEST, ids=lambda part: f"{part['kind']}/{part['metadata']['name']}")
def test_the_manifest_is_as_kubernetes_has_it(part: dict[str, Any]) -> None:
    kubernetes_validate.validate(part, kubernetes_validate.latest_version(), strict=True)


def test_the_pod_is_reported_what_the_server_knows_and_has_the_time_to_drain() -> None:
    spec = POD["spec"]
    (container,) = spec["containers"]
    options = served(container["args"])
    stopping = container["lifecycle"]["preStop"]["sleep"]["seconds"] + needed_to_stop(options)
    assert spec["terminationGracePeriodSeconds"] >= stopping
    assert options.tp == container["resources"]["limits"]["amd.com/gpu"]
    assert options.api_key_file is not None
    assert [port["containerPort"] for port in container["ports"]] == [options.port]
    probes = [container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")]
    assert probes == ["/health/truth", "/health", "/ready"]


def test_every_place_that_is_written_to_is_a_volume_and_the_rest_is_closed() -> None:
    spec = POD["spec"]
    (container,) = spec["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    templates = BY_KIND["StatefulSet"]["spec"]["volumeClaimTemplates"]
    volumes = {volume["name"] for volume in spec["volumes"]} | {each["metadata"]["name"] for each in templates}
    assert {mount["name"] for mount in mounts.values()} == volumes
    assert {path for path, mount in mounts.items() if not mount.get("readOnly")} == {"/cache", "/tmp", "/dev/shm"}
    (shared,) = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shared["medium"] == "Memory"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == int(argument("SERVE_UID"))
    assert spec["securityContext"]["runAsGroup"] == 0, "the group that /cache is open to"


def test_weights_can_be_laid_into_the_claim_that_servers_only_read() -> None:
    """Servers on several nodes read it, and a job writes it: a claim of ReadOnlyMany could never be filled."""
    claim = BY_KIND["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (volume,) = [each for each in POD["spec"]["volumes"] if each["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"], "readOnly": True}


def test_services_the_budget_and_the_monitor_select_the_pods() -> None:
    labels = POD["metadata"]["labels"]
    monitor = yaml.safe_load((DOCKER / "kubernetes" / "pod_monitor.yaml").read_text())
    selectors = [each["spec"]["selector"] for each in MANIFEST if each["kind"] == "Service"]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in (BY_KIND["PodDisruptionBudget"], monitor)]
    assert selectors == [labels] * 4
    names = {each["metadata"]["name"] for each in MANIFEST if each["kind"] == "Service"}
    assert BY_KIND["StatefulSet"]["spec"]["serviceName"] in names
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in POD["spec"]["containers"][0]["ports"]}


# CI


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_takes_its_steps_from_the_script_and_sends_the_report(path: Path) -> None:
    jobs = [job for job in yaml.safe_load(path.read_text())["jobs"].values() if "self-hosted" in job["runs-on"]]
    for job in jobs:
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert {run.removeprefix("bash docker/ci/rocm.sh ") for run in runs} <= set(STEPS)
        (report,) = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
        assert report["if"] == "always()", "of a run that failed too"
        assert report["with"]["if-no-files-found"] == "error"
        limits = [step["timeout-minutes"] for step in job["steps"] if "timeout-minutes" in step]
        assert sum(limits) <= job["timeout-minutes"]
    runs = [step.get("run", "") for step in jobs[0]["steps"]]
    assert [run.split()[-1] for run in runs if run] == list(STEPS[:4])
    assert jobs[0]["steps"][-1]["if"] == "always()", "the GPU is given back"


def ci(step: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a step of the script, with a command in Docker's place."""
    docker = fake_docker(folder, '[ "$1" != ps ] || echo left')
    variables = {**os.environ, "DOCKER": str(docker), "RUNNER_NAME": "mine", **environment}
    command = ["bash", "docker/ci/rocm.sh", step]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def test_containers_of_this_runner_that_were_left_are_removed_first(tmp_path: Path) -> None:
    ci("before", tmp_path)
    assert calls(tmp_path) == ["ps --all --quiet --filter label=rocm-attn.runner=mine", "rm --force left"]


def test_after_a_job_its_container_goes_and_old_images_do(tmp_path: Path) -> None:
    ci("after", tmp_path)
    removed, images, builds = calls(tmp_path)
    assert removed == "rm --force --volumes rocm-attn-tests-mine"
    assert images.startswith("image prune --force --filter label=org.opencontainers.image.title=rocm-attn")
    assert builds.startswith("builder prune --force --filter until=")


def test_what_the_script_is_not_given_or_does_not_know_is_said(tmp_path: Path) -> None:
    done = ci("emulator", tmp_path, EMULATOR="")
    assert done.returncode == 2
    assert "EMULATOR is not set; set it to the command" in done.stderr
    done = ci("everything", tmp_path)
    assert done.returncode == 2
    assert all(f"rocm.sh {step}" in done.stderr for step in STEPS)


def test_an_emulator_under_which_torch_sees_no_amd_gpu_is_not_taken(tmp_path: Path) -> None:
    emulator = tmp_path / "emulator"
    emulator.write_text(f'#!/bin/sh\necho "$2" > {tmp_path}/seen\nexit 1\n')
    emulator.chmod(0o755)
    done = ci("emulator", tmp_path, EMULATOR=f"{emulator} --")
    assert done.returncode == 1
    assert "torch sees no AMD GPU" in done.stderr
    assert (tmp_path / "seen").read_text() == "python3\n"


# The gateway


def test_the_gateway_asks_whether_servers_are_ready_and_lets_them_decide_on_time() -> None:
    assert "--health-check-endpoint /ready" in GATEWAY
    (limit,) = map(float, re.findall(r"--request-timeout-secs (\d+)", GATEWAY))
    assert limit > ServerOptions().deadline_seconds
    (retries,) = map(int, re.findall(r"--retry-max-retries (\d+)", GATEWAY))
    assert retries > 0


def test_a_gateway_without_servers_says_what_it_wants() -> None:
    done = subprocess.run(["bash", "docker/gateway/run.sh"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "run.sh http://" in done.stderr
