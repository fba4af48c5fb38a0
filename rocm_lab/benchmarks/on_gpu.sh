#!/usr/bin/env bash
# Every measurement of rocm_lab/benchmarks/ that needs a GPU and no other library, then the page that shows them:
#   bash rocm_lab/benchmarks/on_gpu.sh [NAME]
# NAME is the machine's in the names of the result files (h200).
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."

readonly name=${1:-h200} results=rocm_lab/benchmarks/results

failures=0
# measure SCRIPT: its result file; a script that misses its target is noted, and the others still run.
measure() {
    python -m "rocm_lab.benchmarks.$1" --out "$results/$1_$name.json" || failures=$((failures + 1))
}

# soak NAME OPTION...: the report of a soak; there is none of one that finds something.
soak() {
    local report
    if report=$(rocm-attn soak --device cuda --provider triton --json "${@:2}"); then
        printf '%s\n' "$report" > "$results/$1_$name.json"
    else
        failures=$((failures + 1))
    fi
}

measure step_profile
measure ranks
python -m rocm_lab.benchmarks.serving --random "$(mktemp -d)" --out "$results/serving_$name.json" || failures=$((failures + 1))
measure round_time
measure sparse_decode
measure selected
measure recurrent
soak soak --steps 20000 --seed 11
soak draft_soak --speculative --steps 13500 --seed 16
python -m rocm_lab.benchmarks.make_tables
exit $((failures > 0))
