#!/usr/bin/env bash
# Sets up .venv-test and runs every check, or only the stages named:
#   bash scripts/test.sh [STAGE...]
# An argument may name several stages, 'host interpreter soak': five run side by side, and the next begins as soon as
# one ends.
#
# With SHARD=2/5 in the environment a stage runs the second of five parts of its tests; one without tests is whole in one
# of the shards.
#
#   lint             ruff, format and lint
#   types            mypy --strict over the package, the tests and the laboratory
#   host             most tests that need neither a GPU nor Triton's interpreter
#   runner           the engine and its models, and faults that the soak must find
#   server           the server and clients that load it, and the doctor, whose processes are mostly waited for; and the
#                    providers of AITER's kernels
#   house            the rules of the house, the pages and the images
#   interpreter      the kernels, and the runtime on top of them, under Triton's interpreter
#   mutation         a mask of each folder of kernels removed in a copy: a check under Triton's interpreter must notice
#   soak             200 random steps of a tiny model, every output checked against the oracle
#   random           one of 29 parts of all pairs of calls, with any values; the reference shares no code with the project
#   text             greedy text against transformers, and the command line on real weights
#   offline          every kernel compiled for gfx942, and some for gfx950 and sm_90, with the installed Triton
#   simulator        every kernel executed as gfx942 and gfx950 machine code, with every address checked
#   oldest           one compile a kernel with the oldest supported Triton
#   host-long, interpreter-long, mutation-long, text-long, offline-long, oldest-long, random-long, simulator-long,
#   soak-long        what these leave out (not part of the default)
#   load-long        LOAD_MINUTES (60) of mixed load (not part of the default)
#   walk-long        pages typed line by line, as an author, an operator and an owner of CI would, in new checkouts and
#                    environments; needs a package registry (not part of the default)
#   offline@VERSION  all AMD compiles with another Triton, for instance offline@3.7.1 (not part of the default)
#   simulator@VERSION  the simulator's full grid with another Triton; writes rocm_lab/simulator/README.md (not part of
#                    the default)
#   aiter-source     AITER's own Triton and Gluon kernels in the simulator and the interpreter, from the checkout that
#                    AITER_SOURCE names; fails where it names none (not part of the default)
#   other-kernels    kernels of Triton's tutorials, AITER, fla, vLLM and SGLang in the simulator, from the folders that
#                    OTHER_KERNELS names; fails where it names none (not part of the default)
#   engines          whole engines with our backend, SGLang's and vLLM's, in the environments that ENGINE_VENVS holds;
#                    where one is missing the end of the output says so, and a stage without any is not a passed one
#   engines-long     what that leaves out; makes the environments first (not part of the default)
#   device           kernels, graphs and the runtime on this machine's GPU (part of the default where there is one)
#   rocm             the same and more on an MI300 or MI350, with a report to send in reports/ (not part of the default)
#   rehearsal        the small steps of rocm with the simulator as the GPU, with their report (not part of the default)
#   images           hadolint and shellcheck over the images and scripts
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
source scripts/venv.sh

# In a shard that there is not, no test would run, and every stage would pass.
if ! [[ ${SHARD:-1/1} =~ ^([1-9][0-9]*)/([1-9][0-9]*)$ ]] || ((BASH_REMATCH[1] > BASH_REMATCH[2])); then
    echo "SHARD is '$SHARD'; give the number of a part and the number of parts, such as 2/5" >&2
    exit 2
fi

# Tensors are small here: a second thread gains nothing, and on a busy machine it waits for the first.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Without bytecode, each process of each stage would compile the package and the tests again.
unset PYTHONDONTWRITEBYTECODE

# Where engines have their virtual environments: .ci/nightly makes them, other runs find them.
export ENGINE_VENVS=${ENGINE_VENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/rocm-attn-engines}

readonly OLDEST_TRITON=3.6.0
readonly VENV=.venv-test
# What a stage returns that could not run here, which is no pass and no failure.
readonly NOT_RUN=77

# run_pytest ARGUMENT...: a run in which nothing passed is a failure, whatever was skipped.
run_pytest() {
    local log=$VENV/log-$stage
    # pytest-benchmark, where somebody has it, warns of -n auto. Of schemathesis a test takes the library alone: as a
    # plugin it would be imported by every worker.
    # A shard may have no test of a stage, or none that can run here.
    python -m pytest -p no:benchmark -p no:schemathesis "$@" | tee "$log" || [ "${SHARD:+$?}" = 5 ]
    grep -E '[0-9]+ passed' "$log" | tail -n 1 >>"$verdicts" || [ -n "${SHARD:-}" ] || {
        echo "no test passed: pytest $*" >&2
        return 1
    }
}

# with_report ARGUMENT...: tests, with a file that says everything about the run.
with_report() {
    local report
    report=reports/$stage-${REPORT_HOST:-$(uname -n)}-$(date -u +%Y%m%d-%H%M%S).json
    run_pytest -p tests.amd.rocm.report --gpu-report "$report" "$@"
}

# report_from_gpu FOLDER...: tests on this machine's GPU. On a GPU that is not AMD's the tests that ask for one are left
# out.
report_from_gpu() {
    local options=()
    if ! python -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
        echo "torch sees no GPU; rocm-attn doctor may say why" >&2
        return 1
    fi
    if python -c 'import torch; raise SystemExit(torch.version.hip is not None)'; then
        options=(-m "not rocm")
    fi
    with_report "${options[@]}" "$@"
}

# run_aiters_kernels: those of the checkout of ROCm/aiter that AITER_SOURCE names.
run_aiters_kernels() {
    if [ -z "${AITER_SOURCE:-}" ]; then
        echo "AITER_SOURCE is not set; set it to the folder of a checkout of github.com/ROCm/aiter" >&2
        return 1
    fi
    run_pytest -n auto tests/amd/aiter_source
    TRITON_INTERPRET=1 run_pytest -n auto tests/amd/aiter_source/test_interpreted.py
}

# run_engines ARGUMENT...: whole engines, each in a virtual environment of its own; those that have one.
run_engines() {
    local engine found=()
    for engine in sglang vllm; do
        if [ -e "$ENGINE_VENVS/$engine/bin/python" ]; then
            found+=(tests/amd/engines/test_"$engine"*.py) # its states have a file of their own
        else
            echo "NOT RUN: engines: $engine has no environment in ENGINE_VENVS='$ENGINE_VENVS';" \
                "run ENGINE_VENVS='$ENGINE_VENVS' bash scripts/engine_venv.sh $engine" | tee -a "$verdicts" >&2
        fi
    done
    [ ${#found[@]} -gt 0 ] || return $NOT_RUN
    run_pytest -n auto --dist loadfile "${found[@]}" "$@" # each file has a worker
}

# walk_pages USER...: the pages of each of these users. The log of a walk in which a line failed is printed.
walk_pages() {
    local user log failed=0
    for user in "$@"; do
        log=$VENV/walk-$user
        python -m tests.amd.docs.walk "$user" "$log" || { failed=1 && cat "$log"; }
        echo "walk as $user: $(tail -n 1 "$log")" | tee -a "$verdicts"
    done
    return $failed
}

# spread ARGUMENT...: tests over all cores. Workers share what is left at the end, where long tests would wait for one.
spread() {
    run_pytest -n auto --dist worksteal "$@"
}

# The folders of tests that need neither a GPU nor Triton's interpreter, in four parts that can run side by side.
readonly HOST=(tests/amd/{host,hip_graphs,runtime,external,integrations,guards,graphs})
readonly RUNNER=(tests/amd/{runner,system})
readonly SERVER=(tests/amd/{server,bench,doctor,aiter,aiter_source}) HOUSE=(tests/amd/{docs,house})
# Those for the owner of an AMD GPU.
readonly ROCM=(tests/amd/{rocm,kernels,hip_graphs,runtime,external,integrations,guards,graphs,system,text,doctor})

# run_on_host ARGUMENT...: tests of these folders.
run_on_host() {
    AITER_SOURCE="" spread "$@"
}

# run_on_gpu ARGUMENT...: the tests of this machine's GPU. Those of the folder system fill it, so they run alone; the others
# run side by side, in no more processes than a GPU of 80 GB has memory for.
run_on_gpu() {
    spread --maxprocesses 12 "$@" tests/amd/{kernels,hip_graphs,runtime,external,integrations,guards,graphs,text,doctor}
    run_pytest "$@" tests/amd/system
}

# compile ARGUMENT...: tests of machine code; all of one row are one worker's, so that it is compiled once.
compile() {
    run_pytest -n auto --dist loadgroup tests/amd/offline "$@"
}

# with_triton VERSION COMMAND...: runs COMMAND with that Triton in place of the installed one.
with_triton() {
    local version=$1 folder=$VENV/triton-$1
    shift
    if [ ! -d "$folder" ]; then
        retry python -m pip install --quiet --no-compile --no-deps --target "$folder.part" "triton==$version"
        mv "$folder.part" "$folder"
    fi
    export PYTHONPATH=$PWD/$folder
    python -c "import triton; assert triton.__version__ == '$version', triton.__version__"
    "$@"
}

# is_anothers STAGE: whether it is no run of pytest, and whole in another shard. Such stages are dealt out in turn: two of
# an hour never meet in one shard.
is_anothers() {
    local each turn=0
    [ -n "${SHARD:-}" ] || return 1
    for each in $all_stages; do
        case $each in
        random-long | load-long | walk-long | soak | soak-long | simulator@* | lint | types | images) ;;
        *) continue ;;
        esac
        if [ "$each" = "$1" ]; then
            [ $((turn % ${SHARD#*/} + 1)) -ne "${SHARD%/*}" ]
            return
        fi
        turn=$((turn + 1))
    done
    return 1
}

run_stage() {
    case $1 in
    lint) ruff format --check && ruff check ;;
    types) mypy -p rocm_attn -p rocm_serve -p rocm_lab -p tests ;;
    host) run_on_host -m "not nightly" "${HOST[@]}" ;;
    runner) run_on_host -m "not nightly" "${RUNNER[@]}" ;;
    server) run_on_host -m "not nightly" "${SERVER[@]}" ;;
    house) run_on_host -m "not nightly" "${HOUSE[@]}" ;;
    host-long) run_on_host -m nightly "${HOST[@]}" "${RUNNER[@]}" "${SERVER[@]}" "${HOUSE[@]}" ;;
    # Of the runtime, by day, the files that launch every kind of kernel; the night has all of it.
    interpreter)
        TRITON_INTERPRET=1 spread -m "not nightly" tests/amd/kernels \
            tests/amd/runtime/test_{drafts,layer_kinds,storing_steps}.py \
            tests/amd/external/test_{calls,lost_sequences}.py tests/amd/integrations/test_{kv_transfer,flashinfer_program}.py
        ;;
    interpreter-long)
        TRITON_INTERPRET=1 spread -m nightly tests/amd/kernels
        TRITON_INTERPRET=1 spread tests/amd/{runtime,external,integrations}
        ;;
    mutation) spread -m "not nightly" tests/amd/mutation ;;
    mutation-long) spread -m nightly tests/amd/mutation ;;
    offline-long) compile -m "nightly" ;;
    random) spread -m "not nightly" tests/amd/random_calls ;;
    random-long)
        SHARD="" spread -m nightly tests/amd/random_calls # the shard that has this stage has all of it
        python -m tests.amd.random_calls --seeds 10:2000 | tee -a "$verdicts"
        ;;
    engines) run_engines -m "not nightly" ;;
    engines-long) bash scripts/engine_venv.sh sglang vllm && run_engines -m nightly ;;
    text) run_pytest -n auto --dist loadfile -m "not nightly" tests/amd/text ;;
    text-long) run_pytest -n auto -m nightly tests/amd/text ;;
    soak) rocm-attn soak --steps 200 --seed 0 ;;
    load-long) python -m tests.amd.server.load --minutes "${LOAD_MINUTES:-60}" | tee -a "$verdicts" ;;
    walk-long) walk_pages author operator ci ;;
    soak-long)
        rocm-attn soak --steps 10000 --seed 1 && rocm-attn soak --recurrent --steps 10000 --seed 1 &&
            rocm-attn soak --speculative --steps 10000 --seed 1
        ;;
    offline) compile -m "not nightly" ;;
    oldest) with_triton $OLDEST_TRITON compile -m "oldest_triton and not nightly" ;;
    oldest-long) with_triton $OLDEST_TRITON compile -m "oldest_triton and nightly" ;;
    offline@*) with_triton "${1#offline@}" compile -k gfx ;;
    # By one pytest, which has processes of its own for the kernels: each of several workers would run every case.
    simulator) run_pytest -m "not nightly" tests/amd/simulator ;;
    simulator-long) spread -m nightly tests/amd/simulator ;;
    simulator@*) with_triton "${1#simulator@}" python -m tests.amd.simulator.record rocm_lab/simulator/README.md ;;
    aiter-source) run_aiters_kernels ;;
    other-kernels) : "${OTHER_KERNELS:?names clones and folders of packages}" && run_pytest tests/amd/simulator/test_other_kernels.py ;;
    device) run_on_gpu -m "not nightly" ;;
    rocm) report_from_gpu "${ROCM[@]}" ;;
    # All are collected: what they import must be there.
    rehearsal) with_report -p tests.amd.rocm.stand_in_gpu -k test_simulated "${ROCM[@]}" ;;
    images)
        hadolint docker/{,stand_in/}Dockerfile docker/Dockerfile.engine
        shellcheck -x docker/*.sh docker/{ci,gateway}/*.sh docker/stand_in/rocm/bin/* scripts/*.sh rocm_lab/benchmarks/*.sh .ci/*
        ;;
    *)
        echo "no stage is called $1; the stages are listed at the top of scripts/test.sh" >&2
        return 2
        ;;
    esac
}

make_venv $VENV '.[dev]' './rocm_serve[server,otel]' './rocm_lab[bench,races]'
verdicts=$VENV/verdicts
: >"$verdicts"
# A verdict of an earlier run must never be read as one of this run.
rm -f "$VENV"/stage-* "$VENV"/output-*

if [ $# -eq 0 ]; then
    # The longest first: what is left at the end is short, and no core idles for long. Without Triton's cache, compiling
    # makes simulator and offline the longest; server mostly waits, so that it leaves the cores to the others.
    set -- 'simulator offline runner server host interpreter house oldest types mutation random text soak images lint engines'
    if python -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
        set -- "$@" device
    fi
fi

readonly all_stages=$*

# time_stage STAGE: runs it and writes what came of it into $VENV/stage-STAGE.
time_stage() {
    local started=$SECONDS verdict=passed
    # In a subshell of its own: `set -e` holds inside, and no stage's environment reaches the next.
    set +e
    (
        set -e
        ! is_anothers "$1" || exit $NOT_RUN
        run_stage "$1"
    )
    case $? in # in a condition, `set -e` would not hold inside
    0) ;;
    "$NOT_RUN") verdict='NOT RUN' ;;
    *) verdict=FAILED ;;
    esac
    set -e
    printf '%-16s %-7s %4d s\n' "$1" "$verdict" $((SECONDS - started)) >"$VENV/part-stage-$1"
    mv "$VENV/part-stage-$1" "$VENV/stage-$1" # whole, for who looks while others run
}

# print_ended STAGE...: the output of those that have ended, each whole and once. The verdict has a line of its own, also
# after output whose last line does not end.
print_ended() {
    local name
    for name in "$@"; do
        if [ -e "$VENV/stage-$name" ] && [ -e "$VENV/output-$name" ]; then
            sed "\$a\\" "$VENV/output-$name"
            cat "$VENV/stage-$name"
            rm "$VENV/output-$name"
        fi
    done
}

# print_rest: what is left when the script ends early, of stages that have not ended as well.
print_rest() {
    local output
    for output in "$VENV"/output-*; do
        if [ -e "$output" ]; then
            echo "=== ${output#"$VENV"/output-} did not end; its output so far:"
            cat "$output"
            rm "$output"
        fi
    done
}
trap print_rest EXIT

# time_side_by_side STAGE...: five at a time, as some mostly wait for processes that they started. Each has half of the
# cores (unless PYTEST_XDIST_AUTO_NUM_WORKERS says how many), as a worker of pytest's imports and collects all tests
# of its stage. The output of a stage is printed when it ends.
time_side_by_side() {
    local cores workers
    cores=$(env -u OMP_NUM_THREADS nproc) # which believes OMP_NUM_THREADS
    workers=${PYTEST_XDIST_AUTO_NUM_WORKERS:-$(((cores + 1) / 2))}
    # A single worker would only add a process that hands it tests: with 0 pytest runs them itself.
    [ "$workers" -gt 1 ] || workers=0
    for stage in "$@"; do
        while [ "$(jobs -rp | wc -l)" -ge 5 ]; do
            wait -n || true # whether it passed is in its file
            print_ended "$@"
        done
        PYTEST_XDIST_AUTO_NUM_WORKERS=$workers time_stage "$stage" >"$VENV/output-$stage" 2>&1 &
    done
    while [ -n "$(jobs -rp)" ]; do
        wait -n || true
        print_ended "$@"
    done
    print_ended "$@"
}

# verdict_of STAGE: its line of the summary; a stage that wrote none was ended by something else.
verdict_of() {
    cat "$VENV/stage-$1" 2>/dev/null || printf '%-16s %-7s\n' "$1" FAILED
}

summary=""
for stages in "$@"; do
    echo "=== $stages"
    if [ "$stages" = "${stages%% *}" ]; then
        stage=$stages
        time_stage "$stage"
    else
        # shellcheck disable=SC2086 # the names of the stages
        time_side_by_side $stages
    fi
    for stage in $stages; do
        summary+=$(verdict_of "$stage")$'\n'
    done
done

{
    printf '\n%s' "$summary"
    cat "$verdicts"
} | tee "$VENV/summary"
[[ $summary != *FAILED* ]]
