#!/usr/bin/env bash
# Builds the image for tests and runs a stage of them in it:
#   bash docker/run_tests.sh host      what needs no GPU
#   bash docker/run_tests.sh device    kernels, graphs and the runtime on this machine's GPU, AMD or NVIDIA
#   bash docker/run_tests.sh rocm      the same and more, with a report to send: reports/*.json
#
#   PLATFORM       rocm or cuda (rocm where there is /dev/kfd, else cuda if there is a GPU, else rocm)
#   IMAGE          an image to use instead of building one
#   DOCKER         the command (docker)
#   BUILD_OPTIONS  more options for the build, such as --build-arg INSTALL_AITER=0
#   RUN_OPTIONS    more options for the run, such as --network host
#   REPORT_HOST    the name of the host in the report (its own)
set -euo pipefail
cd "$(dirname "$0")/.."

stage=${1:-}
case $stage in
host | device | rocm) ;;
*)
    sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

docker=${DOCKER:-docker}
has_nvidia_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null; }
if [ -z "${PLATFORM:-}" ]; then
    PLATFORM=rocm
    if [ ! -e /dev/kfd ] && has_nvidia_gpu; then
        PLATFORM=cuda
    fi
fi

image=${IMAGE:-rocm-attn:$PLATFORM-ci}
if [ -z "${IMAGE:-}" ]; then
    # The tests run below, on the stage that was asked for.
    # shellcheck disable=SC2086 # options are words
    DOCKER_BUILDKIT=1 "$docker" build --file docker/Dockerfile --target ci --build-arg "PLATFORM=$PLATFORM" \
        --build-arg RUN_TESTS=0 ${BUILD_OPTIONS:-} --tag "$image" .
fi

# group_options: the groups of the device files, by number; the image's names may have other numbers.
group_options() {
    stat --format=%g /dev/kfd /dev/dri/renderD* | sort --unique | sed 's/^/--group-add /'
}

options=(--rm --ipc=host)
if [ "$stage" != host ]; then
    options+=(--ulimit memlock=-1)
    if [ "$PLATFORM" = cuda ]; then
        options+=(--gpus all)
    elif [ -e /dev/kfd ]; then
        options+=(--device=/dev/kfd --device=/dev/dri --security-opt seccomp=unconfined --cap-add=SYS_PTRACE)
        # shellcheck disable=SC2207 # options are words
        options+=($(group_options))
    else
        echo "there is no /dev/kfd: '$stage' needs an AMD GPU with its driver, or PLATFORM=cuda" >&2
        exit 1
    fi
fi
if [ "$stage" = rocm ]; then
    mkdir -p reports
    started=$(mktemp)
    trap 'rm -f "$started"' EXIT
    # The image's user writes there.
    chmod a+rwx reports
    options+=(--volume "$PWD/reports:/src/reports" --env "REPORT_HOST=${REPORT_HOST:-$(uname -n)}")
    # The image has no history to read it from.
    options+=(--env "BENCHMARK_COMMIT=$(git describe --always --abbrev=12 --dirty=+ 2>/dev/null || echo unknown)")
fi

status=0
# shellcheck disable=SC2086 # options are words
"$docker" run "${options[@]}" ${RUN_OPTIONS:-} "$image" "$stage" || status=$?
if [ "$stage" = rocm ]; then
    # Of a run that failed too: that is when it is wanted most.
    report=$(find reports -name '*.json' -newer "$started")
    echo "${report:+the report to send: }${report:-no report was written}"
fi
exit "$status"
