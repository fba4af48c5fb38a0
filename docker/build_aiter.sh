#!/usr/bin/env bash
# Builds AITER's wheel into a folder, with its modules compiled ahead; without a wheel where it is not wanted.
#   build_aiter.sh FOLDER
#   PLATFORM          rocm, or anything else for an image without AITER
#   INSTALL_AITER     1 or 0
#   AITER_REPOSITORY  where to clone it from
#   AITER_COMMIT      what to build: a tag or a commit; one before the first that is served is refused
#   GPU_ARCHS         gfx942;gfx950
#   MAX_JOBS          compilers that run at a time; each takes gigabytes
#
# Beside the wheel: constraints.txt, the releases that it was built with, and commit.txt.
set -euo pipefail

folder=$1
own=$(dirname "$(realpath "$0")")
mkdir -p "$folder"
if [ "$PLATFORM" != rocm ] || [ "$INSTALL_AITER" != 1 ]; then
    echo "without AITER"
    : >"$folder/constraints.txt"
    echo none >"$folder/commit.txt"
    exit
fi

# What the project knows of it, before hours are spent.
python3 "$own/aiter_releases.py" "$AITER_COMMIT"

# retry COMMAND...: three times; what is over a network fails now and then.
retry() {
    local attempt
    for attempt in 1 2 3; do
        if "$@"; then
            return
        fi
        echo "attempt $attempt of 3 failed: $*" >&2
        sleep $((attempt * 10))
    done
    return 1
}

clone() {
    rm -rf "$2"
    git clone --quiet "$1" "$2"
}

source=$(mktemp -d)
retry clone "$AITER_REPOSITORY" "$source"
cd "$source"
# By force: files that git rewrites at a checkout can leave a fresh clone dirty.
git checkout --quiet --force "$AITER_COMMIT"
retry git submodule --quiet update --init --recursive
retry python3 -m pip install --requirement requirements.txt setuptools setuptools_scm wheel

# The base's Triton stays: AITER would bring one of its own.
export AITER_USE_SYSTEM_TRITON=1 GPU_ARCHS MAX_JOBS
# Most modules; then variants that this leaves out and the provider calls; then the wheel of all that is there.
PREBUILD_KERNELS=1 python3 setup.py build
python3 "$own/build_aiter_variants.py"
PREBUILD_KERNELS=0 python3 setup.py bdist_wheel --dist-dir "$folder"

python3 "$own/pins.py" built "$folder"/*.whl >"$folder/constraints.txt"
git rev-parse HEAD >"$folder/commit.txt"
cd /
rm -rf "$source"
