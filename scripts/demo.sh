#!/usr/bin/env bash
# Sets up .venv and lets SmolLM2 (135M, real weights) answer a prompt through the runtime; on a CPU if need be.
#   bash scripts/demo.sh [PROMPT...]
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
source scripts/venv.sh

make_venv .venv . ./rocm_serve
if [ $# -eq 0 ]; then
    set -- "What is the capital of France?" "Write a haiku about rivers."
fi
rocm-attn generate --model smollm2 --max-new-tokens 64 -- "$@"
