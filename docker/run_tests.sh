#!/usr/bin/env bash
# Builds the image for tests and runs a stage of them in it:
#   bash docker/run_tests.sh host       what needs no GPU
#   bash docker/run_tests.sh device     kernels, graphs and the runtime on this machine's GPU, AMD or NVIDIA
#   bash docker/run_tests.sh rocm       the same and more, with a report to send: reports/*.json
#   bash docker/run_tests.sh rehearsal  the small steps of rocm on a simulated MI300X, with their report; needs no GPU
#   bash docker/run_tests.sh build      only builds it
#
#   PLATFORM       rocm or cuda (rocm where there is /dev/kfd, else cuda if there is a GPU, else rocm)
#   IMAGE          an image to use instead of building one
#   AITER_IMAGE    a name, such as rocm-attn-aiter: AITER is built into an image of it once, tagged by all that decides
#                  what is compiled, and taken from there ever after
#   DOCKER         the command (docker)
#   BUILD_OPTIONS  more options for the builds, such as --build-arg INSTALL_AITER=0
#   RUN_OPTIONS    more options for the run, such as --network host
#   CONTAINER      the container's name (rocm-attn-tests-PID); it is removed when this script ends, however that is
#   REPORT_HOST    the name of the host in the report (its own)
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

stage=${1:-}
case $stage in
host | device | rocm | rehearsal | build) ;;
*)
    sed -n '2,19s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

needs_gpu() { [ "$stage" = device ] || [ "$stage" = rocm ]; }
writes_report() { [ "$stage" = rocm ] || [ "$stage" = rehearsal ]; }

docker=${DOCKER:-docker}
source docker/needs_docker.sh
needs_docker "$docker"
has_nvidia_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null; }
if [ -z "${PLATFORM:-}" ]; then
    PLATFORM=rocm
    if [ ! -e /dev/kfd ] && has_nvidia_gpu; then
        PLATFORM=cuda
    fi
fi

# build TARGET TAG OPTION...
build() {
    local target=$1 tag=$2
    shift 2
    # shellcheck disable=SC2086 # options are words
    "$docker" buildx build --load --file docker/Dockerfile --target "$target" --build-arg "PLATFORM=$PLATFORM" \
        --build-arg "REVISION=$(git describe --always --abbrev=12 --dirty=+ 2>/dev/null || echo unknown)" \
        ${BUILD_OPTIONS:-} --tag "$tag" "$@" .
}

# aiter_key: of what decides what AITER's wheel holds.
aiter_key() {
    {
        echo "$PLATFORM ${BUILD_OPTIONS:-}"
        grep --extended-regexp '^ARG (BASE_IMAGE|AITER_\w+|GPU_ARCHS)=' docker/Dockerfile
        cat docker/build_aiter.sh docker/build_aiter_variants.py
    } | sha256sum | cut --characters=-16
}

image=${IMAGE:-rocm-attn:$PLATFORM-ci}
if [ -z "${IMAGE:-}" ]; then
    needs_plugin "$docker" buildx
    options=()
    if [ -n "${AITER_IMAGE:-}" ]; then
        aiter=$AITER_IMAGE:$(aiter_key)
        "$docker" image inspect "$aiter" >/dev/null 2>&1 || build aiter "$aiter"
        options=(--build-context "aiter=docker-image://$aiter")
    fi
    build ci "$image" "${options[@]}"
fi
if [ "$stage" = build ]; then
    exit
fi

# group_options: the groups of the device files, by number; the image's names may have other numbers.
group_options() {
    stat --format=%g /dev/kfd /dev/dri/renderD* | sort --unique | sed 's/^/--group-add /'
}

container=${CONTAINER:-rocm-attn-tests-$$}
options=(--rm --init --ipc=host --name "$container" --label rocm-attn.tests)
if needs_gpu; then
    options+=(--ulimit memlock=-1)
    if [ "$PLATFORM" = cuda ]; then
        options+=(--gpus all)
    elif [ -e /dev/kfd ]; then
        options+=(--device=/dev/kfd --device=/dev/dri --security-opt seccomp=unconfined)
        # shellcheck disable=SC2207 # options are words
        options+=($(group_options))
    else
        echo "there is no /dev/kfd: '$stage' needs an AMD GPU with its driver, or PLATFORM=cuda" >&2
        exit 1
    fi
fi

started=$(mktemp)
# shellcheck disable=SC2329 # called by the trap
end() {
    # A client that was killed leaves its container running, on the GPU.
    "$docker" rm --force --volumes "$container" >/dev/null 2>&1 || true
    rm -f "$started"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if writes_report; then
    mkdir -p reports
    # The image's user writes there.
    chmod a+rwx reports
    options+=(--volume "$PWD/reports:/src/reports" --env "REPORT_HOST=${REPORT_HOST:-$(uname -n)}")
    # The image has no history to read it from.
    options+=(--env "BENCHMARK_COMMIT=$(git describe --always --abbrev=12 --dirty=+ 2>/dev/null || echo unknown)")
fi

# Each stage that needs no GPU and no other process.
[ "$stage" != host ] || stage="host runner"

status=0
# Next to this script, which a signal then reaches at once.
# shellcheck disable=SC2086 # options are words
"$docker" run "${options[@]}" ${RUN_OPTIONS:-} "$image" "$stage" &
wait $! || status=$?
if writes_report; then
    # Of a run that failed too: that is when it is wanted most.
    report=$(find reports -name '*.json' -newer "$started")
    echo "${report:+the report: }${report:-no report was written}"
fi
exit "$status"
