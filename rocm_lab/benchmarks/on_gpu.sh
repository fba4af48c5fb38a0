#!/usr/bin/env bash
# Every measurement of rocm_lab/benchmarks/ that needs a GPU and no other library, then the page that shows them:
#   bash rocm_lab/benchmarks/on_gpu.sh [NAME]
# NAME is the machine's in the names of the result files (h200).
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly name=${1:-h200} results=rocm_lab/benchmarks/results

failures=0
# measure SCRIPT OPTION...: one script's result file; one that misses its target is noted, and the others still run.
measure() {
    local script=$1
    shift
    python -m "rocm_lab.benchmarks.$script" "$@" --out "$results/${script}_$name.json" || failures=$((failures + 1))
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

# of_host SCRIPT...: three passes of all of them in turn, of which the smallest numbers count.
of_host() {
    local script pass
    for pass in 1 2 3; do
        for script; do python -m "rocm_lab.benchmarks.$script" --out "$passes/${script}_$pass.json" || return 1; done
    done
    for script; do
        python -m rocm_lab.benchmarks.quietest "$passes/${script}_"[123].json --out "$results/${script}_$name.json" || return 1
    done
}

passes=$(mktemp -d)
readonly passes
of_host host_time eager_step || failures=$((failures + 1))
rm -r "$passes"
measure round_time
measure steps_ahead
measure ngram_speculation
measure external_host_time
measure fill_time
measure graph_cost
measure deterministic_cost
measure eight_bit_cost
measure kv_transfer
measure latent_decode
measure draft_rounds
measure speculative
measure sparse_decode
measure wide_rows
measure score_cost
measure profile_misses
measure random_shapes
measure tensor_parallel
soak soak --steps 20000 --seed 11
soak draft_soak --speculative --rounds 10000 --seed 16
python -m rocm_lab.benchmarks.make_tables
exit $((failures > 0))
