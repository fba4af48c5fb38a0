#!/usr/bin/env bash
# What CI does on a machine with an MI300X, MI325X, MI350X or MI355X, step by step or all of it:
#   bash docker/ci/rocm.sh              before, build, test and after; after runs whatever came of the others
#   bash docker/ci/rocm.sh before       removes containers that a job before left, and fails where a GPU is in use
#   bash docker/ci/rocm.sh build        the image for tests; AITER is compiled once a machine and kept
#   bash docker/ci/rocm.sh test         the tests on the GPU; the report is in reports/
#   bash docker/ci/rocm.sh after        removes this job's container, fails where a GPU is in use, makes room on the disk
#   bash docker/ci/rocm.sh emulator     the tests of a GPU on AMD's emulator; needs no GPU; never tried
#
#   RUNNER_NAME     names this runner, so that its own containers are found again (the host's name)
#   CONTAINER       the container's name (rocm-attn-tests-RUNNER_NAME)
#   AITER_IMAGE     the image that keeps AITER (rocm-attn-aiter)
#   DOCKER          the command (docker)
#   EMULATOR        of emulator: the command that runs another one with an emulated GPU,
#                   such as 'rocjitsu run --profile mi300x --'
#   EMULATED_TESTS  of emulator: what is run (tests/amd/rocm/test_errors.py)
#   BUILD_OPTIONS, RUN_OPTIONS, REPORT_HOST: those of docker/run_tests.sh
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."

export DOCKER=${DOCKER:-docker}
RUNNER_NAME=${RUNNER_NAME:-$(uname -n)}
export CONTAINER=${CONTAINER:-rocm-attn-tests-$RUNNER_NAME}
export AITER_IMAGE=${AITER_IMAGE:-rocm-attn-aiter}
readonly LABEL=rocm-attn.runner=$RUNNER_NAME
# What is two weeks old is built again where it is needed.
readonly KEPT=336h

before() {
    "$DOCKER" ps --all --quiet --filter "label=$LABEL" | xargs --no-run-if-empty "$DOCKER" rm --force
    bash docker/gpu_is_free.sh
}

build() {
    bash docker/run_tests.sh build
}

# `test` is a command of the shell.
test_on_gpu() {
    IMAGE=rocm-attn:rocm-ci RUN_OPTIONS="--label $LABEL ${RUN_OPTIONS:-}" bash docker/run_tests.sh rocm
}

after() {
    local status=0
    "$DOCKER" rm --force --volumes "$CONTAINER" >/dev/null 2>&1 || true
    bash docker/gpu_is_free.sh || status=$?
    "$DOCKER" image prune --force --filter label=org.opencontainers.image.title=rocm-attn
    "$DOCKER" builder prune --force --filter until=$KEPT
    return "$status"
}

# In this machine's Python: the emulator puts itself between torch and the driver, where no image has it.
emulator() {
    if [ -z "${EMULATOR:-}" ]; then
        echo "EMULATOR is not set; set it to the command that runs another one with an emulated GPU, such as" \
            "'rocjitsu run --profile mi300x --'" >&2
        return 2
    fi
    local run report
    read -ra run <<<"$EMULATOR"
    local seen='import torch
assert torch.version.hip, "torch is not built for ROCm"
print(torch.cuda.get_device_properties(0).gcnArchName)'
    "${run[@]}" python3 -c "$seen" || {
        echo "under '$EMULATOR' torch sees no AMD GPU; docs/deployment.md says what it needs" >&2
        return 1
    }
    mkdir -p reports
    report=reports/emulated-${REPORT_HOST:-$(uname -n)}-$(date -u +%Y%m%d-%H%M%S).json
    # shellcheck disable=SC2086 # tests are words
    "${run[@]}" python3 -m pytest -p no:benchmark -p tests.amd.rocm.report --gpu-report "$report" \
        ${EMULATED_TESTS:-tests/amd/rocm/test_errors.py}
}

source docker/needs_docker.sh
case ${1:-all} in
before | build | test | after | all) needs_docker "$DOCKER" ;;
esac
case ${1:-all} in
before | build | after | emulator) "$1" ;;
test) test_on_gpu ;;
all)
    # No `||` or `if` around the steps: `set -e` would not hold inside them.
    trap 'status=$?; trap - EXIT; bash docker/ci/rocm.sh after || exit $((status ? status : 1)); exit $status' EXIT
    before
    build
    test_on_gpu
    ;;
*)
    sed -n '2,20s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
