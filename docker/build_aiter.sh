#!/usr/bin/env bash
# Builds AITER's wheel into a folder, with its modules compiled ahead; an empty folder where it is not wanted.
#   build_aiter.sh FOLDER
#   PLATFORM       rocm, or anything else for an image without AITER
#   INSTALL_AITER  1 or 0
#   AITER_COMMIT   what to build
#   GPU_ARCHS      gfx942;gfx950
#   MAX_JOBS       compilers that run at a time; each takes gigabytes
set -euo pipefail

folder=$1
mkdir -p "$folder"
if [ "$PLATFORM" != rocm ] || [ "$INSTALL_AITER" != 1 ]; then
    echo "without AITER"
    exit
fi

source=$(mktemp -d)
git clone --quiet https://github.com/ROCm/aiter.git "$source"
cd "$source"
git checkout --quiet "$AITER_COMMIT"
git submodule --quiet update --init --recursive
python3 -m pip install --requirement requirements.txt setuptools_scm ninja
# The base's Triton stays: AITER would bring one of its own.
PREBUILD_KERNELS=1 AITER_USE_SYSTEM_TRITON=1 GPU_ARCHS=$GPU_ARCHS MAX_JOBS=$MAX_JOBS \
    python3 setup.py bdist_wheel --dist-dir "$folder"
rm -rf "$source"
