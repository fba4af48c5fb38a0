#!/usr/bin/env bash
# Builds the images on a stand-in for their base and holds them to what they promise; needs Docker with buildx and
# compose, and no GPU.
#   bash docker/check_images.sh
#
#   DOCKER         the command (docker)
#   START_IMAGE    what the stand-in is made from (a Debian, or an image with Python; docker/stand_in/Dockerfile's)
#   BASE_OPTIONS   more options for the stand-in's build, such as --build-arg TORCH_REQUIREMENT=...
#   BUILD_OPTIONS  more options for every build, such as --network host
#   AITER_SOURCE   a clone of AITER that has the Dockerfile's commit (cloned from GitHub); its jit/ and setup.py are used
#   KEEP           1: leave the images rocm-attn-check:* behind
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

docker=${DOCKER:-docker}
source docker/needs_docker.sh
needs_docker "$docker"
needs_plugin "$docker" buildx
needs_plugin "$docker" compose
export DOCKER_BUILDKIT=1
work=$(mktemp -d)
readonly NAME=rocm-attn-check-$$
num_checks=0

cleanup() {
    local ids
    ids=$("$docker" ps --all --quiet --filter "label=$NAME")
    # shellcheck disable=SC2086 # ids are words
    [ -z "$ids" ] || "$docker" rm --force --volumes $ids >/dev/null
    ids=$("$docker" volume ls --quiet --filter "label=$NAME")
    # shellcheck disable=SC2086 # ids are words
    [ -z "$ids" ] || "$docker" volume rm --force $ids >/dev/null
    if [ "${KEEP:-0}" != 1 ]; then
        ids=$("$docker" image ls --quiet --filter 'reference=rocm-attn-check' | sort --unique)
        # shellcheck disable=SC2086 # ids are words
        [ -z "$ids" ] || "$docker" image rm --force $ids >/dev/null
    fi
    rm -rf "$work"
}
trap cleanup EXIT

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

holds() {
    num_checks=$((num_checks + 1))
    echo "holds: $*"
}

# Tensors are small here: a second thread gains nothing, and on a busy machine the first one waits for it.
readonly ONE_THREAD=(--env OMP_NUM_THREADS=1)
run() { "$docker" run --rm --label "$NAME" "${ONE_THREAD[@]}" "$@"; }

# in_python OPTION... -- IMAGE SCRIPT: a script of docker/stand_in in an image, past its command.
in_python() {
    local options=()
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    run --interactive --entrypoint /opt/rocm-attn/entrypoint.sh "${options[@]}" "$2" python3 - <"docker/stand_in/$3"
}

# build TAG OPTION...: the project's Dockerfile on the stand-in.
build() {
    local tag=$1
    shift
    # shellcheck disable=SC2086 # options are words
    "$docker" build --progress plain --file docker/Dockerfile --build-arg BASE_IMAGE=rocm-attn-check:base \
        --build-arg TORCH_FOR="$torch_for" --build-arg AITER_REPOSITORY=/opt/stand-in/aiter.git \
        --build-arg AITER_COMMIT="$stand_in_commit" --build-arg MAX_JOBS=2 --build-arg REVISION=checked \
        ${BUILD_OPTIONS:-} --tag "rocm-attn-check:$tag" "$@" . >"$work/$tag.log" 2>&1
}

# must_build TAG OPTION...
must_build() {
    build "$@" || {
        tail -n 60 "$work/$1.log" >&2
        fail "the image $1 does not build"
    }
}

# must_not_build SENTENCE TAG OPTION...: a build that fails, and says why.
must_not_build() {
    local sentence=$1
    shift
    if build "$@"; then
        fail "the image $1 was built and should not have been"
    fi
    grep -q "$sentence" "$work/$1.log" || {
        tail -n 30 "$work/$1.log" >&2
        fail "the build of $1 does not say '$sentence'"
    }
    holds "no image: $sentence"
}

# AITER's own jit/ and setup.py, with stand-ins around them, as a repository.
make_aiter() {
    local commit source=${AITER_SOURCE:-}
    commit=$(sed -n 's/^ARG AITER_COMMIT=//p' docker/Dockerfile)
    if [ -z "$source" ]; then
        source=$work/clone
        git clone --quiet --filter=blob:none --no-checkout https://github.com/ROCm/aiter.git "$source"
    fi
    mkdir "$work/tree"
    git -C "$source" archive "$commit" \
        setup.py pyproject.toml MANIFEST.in requirements.txt aiter/jit aiter/ops/__init__.py aiter/ops/enum.py \
        aiter/ops/mha.py aiter/utility/aiter_types.py aiter/utility/dtypes.py csrc/include/aiter_enum.h |
        tar --extract --directory "$work/tree"
    cp -r docker/stand_in/aiter/. "$work/tree/"
    git -C "$work/tree" init --quiet
    git -C "$work/tree" add --all --force
    # The same files are the same commit, and the clone does not say where it is from, so that a second run finds the
    # first one's layers.
    GIT_AUTHOR_DATE='2000-01-01 00:00Z' GIT_COMMITTER_DATE='2000-01-01 00:00Z' \
        git -C "$work/tree" -c user.name=stand-in -c user.email=stand-in@invalid commit --quiet --message "stand-in"
    stand_in_commit=$(git -C "$work/tree" rev-parse HEAD)
    git -c pack.threads=1 clone --quiet --bare --no-local "$work/tree" "$work/base/aiter.git"
    git -C "$work/base/aiter.git" config --remove-section remote.origin
    rm -rf "$work/base/aiter.git/hooks"
}

echo "== the stand-in"
mkdir "$work/base"
cp -r docker/stand_in/rocm docker/stand_in/Dockerfile "$work/base/"
make_aiter
# shellcheck disable=SC2086 # options are words
"$docker" build --progress plain ${START_IMAGE:+--build-arg START_IMAGE=$START_IMAGE} ${BASE_OPTIONS:-} \
    ${BUILD_OPTIONS:-} --tag rocm-attn-check:base "$work/base" >"$work/base.log" 2>&1 || {
    tail -n 40 "$work/base.log" >&2
    fail "the stand-in does not build"
}
torch_for=$(run rocm-attn-check:base python3 -W ignore -c \
    'import torch; print("rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu")')
echo "its torch is built for: $torch_for"

echo "== the images"
must_build serve
must_build ci --target ci
must_build plain --build-arg INSTALL_AITER=0
must_build aiter --target aiter
must_build cuda --build-arg PLATFORM=cuda --build-arg CUDA_BASE_IMAGE=rocm-attn-check:base --build-arg TORCH_REQUIREMENT=torch

echo "== what must not become an image"
if [ "$torch_for" != rocm ]; then
    # Later options win: this is the Dockerfile's own default.
    must_not_build "is built for $torch_for and the image is to be for rocm" wrong-torch --build-arg TORCH_FOR=rocm
fi
must_not_build "is older than" old-aiter --build-arg AITER_COMMIT=v0.1.12
# broken SENTENCE COMMAND...: a copy of the finished image, with something wrong, before it is verified once more.
broken() {
    local sentence=$1 said
    shift
    if said=$(run --user 0 --entrypoint bash rocm-attn-check:serve -c \
        "$1"' && python3 /opt/rocm-attn/verify.py image rocm 1' 2>&1); then
        fail "verify.py lets pass: $1"
    fi
    [[ $said == *"$sentence"* ]] || fail "verify.py does not say '$sentence' but: $said"
    holds "refused: $sentence"
}
# distribution NAME LINES: a command that makes pip believe that it is installed. LINES: more of its metadata.
distribution() {
    local metadata="Metadata-Version: 2.1\\nName: $1\\nVersion: 1.0\\n${2:-}"
    printf "folder=%s/%s-1.0.dist-info && mkdir \$folder && printf '%s' > \$folder/METADATA" \
        "$packages" "$1" "$metadata"
}
packages=$(run --entrypoint python3 rocm-attn-check:serve -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
broken "AITER was asked for and is not installed" "python3 -m pip uninstall --quiet --yes amd-aiter"
if [ "$torch_for" != cuda ]; then
    broken "libraries of CUDA have come with another package: nvidia-cublas-cu12" "$(distribution nvidia_cublas_cu12)"
fi
broken "requires absent-package" "$(distribution odd 'Requires-Dist: absent-package\n')"
broken "pybind11 is 3.1.0 and was to stay" "PIP_CONSTRAINT= python3 -m pip install --quiet pybind11==3.1.0"

echo "== AITER's JIT, as the image's user"
jit=jit.py
said=$(in_python -- rocm-attn-check:serve $jit)
grep -q "^module_aiter_core linked" <<<"$said" || fail "the wheel's modules are not loaded: $said"
grep -q "^mha_batch_prefill_.* linked" <<<"$said" || fail "batch prefill was not compiled ahead: $said"
grep -q "^module_mha_fwd compiled now" <<<"$said" || fail "nothing was compiled and loaded: $said"
holds "a wheel's module is loaded, batch prefill is compiled ahead, a missing module is compiled and then loaded"

# What the image does about it taken away: the stand-in's AITER then fails as AMD's does (aiter#887).
if said=$(run --interactive --entrypoint env rocm-attn-check:serve -u AITER_JIT_DIR python3 - \
    <docker/stand_in/$jit 2>&1); then
    fail "AITER finds what it compiles without AITER_JIT_DIR, so this check shows nothing"
fi
[[ $said == *"No module named 'aiter.jit.module_mha_fwd'"* ]] || fail "another failure than aiter#887's: $said"
holds "without AITER_JIT_DIR the same AITER does not find what it compiles, so the check above can fail"

# volume_for NAME
volume_for() { "$docker" volume create --label "$NAME" "$NAME-$1" >/dev/null && echo "$NAME-$1"; }
cache=$(volume_for aiter)
in_python --volume "$cache:/cache" -- rocm-attn-check:serve $jit >/dev/null
said=$(in_python --volume "$cache:/cache" -- rocm-attn-check:serve $jit)
grep -q "^module_mha_fwd compiled before" <<<"$said" || fail "a second container compiles again: $said"
holds "a second container on the same volume compiles nothing"

# shellcheck disable=SC2016 # for the container's shell
run --volume "$cache:/cache" --entrypoint bash rocm-attn-check:serve -c \
    'mv "$(readlink /opt/rocm-attn/aiter)" /cache/amd-aiter-0.0_of_another_image'
said=$(in_python --volume "$cache:/cache" -- rocm-attn-check:serve $jit)
grep -q "^module_mha_fwd compiled now" <<<"$said" || fail "what another image compiled was loaded: $said"
holds "what another AITER compiled into the same volume is left alone"

empty=(--mount "type=volume,source=$(volume_for empty),target=/cache,volume-nocopy")
run "${empty[@]}" --user 0 --entrypoint chmod rocm-attn-check:serve 0777 /cache
said=$(in_python "${empty[@]}" -- rocm-attn-check:serve $jit)
grep -q "^module_aiter_core linked" <<<"$said" || fail "an empty /cache hides the wheel's modules: $said"
holds "an empty mount on /cache has the wheel's modules linked at the start"

two() { in_python --volume "$cache:/cache" -- rocm-attn-check:serve $jit >"$work/two.$1" 2>&1; }
run --volume "$cache:/cache" --entrypoint bash rocm-attn-check:serve -c 'rm -rf /cache/amd-aiter*'
two 1 &
first=$!
two 2 || fail "one of two that start at once: $(cat "$work/two.2")"
wait $first || fail "one of two that start at once: $(cat "$work/two.1")"
holds "two containers that start at once on an empty cache both load everything"

echo "== users"
hard=(--read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges)
[ "$(run --entrypoint id rocm-attn-check:serve -u)" = 10001 ] || fail "the user is not 10001"
in_python "${hard[@]}" -- rocm-attn-check:serve $jit >/dev/null
in_python "${hard[@]}" --user 1234567:0 -- rocm-attn-check:serve $jit >/dev/null
holds "read-only root, no capabilities: AITER compiles, as uid 10001 and as a strange uid of group 0"
for image in serve plain; do
    run "${hard[@]}" --user 1234567:0 rocm-attn-check:$image doctor >"$work/doctor" || fail "$(cat "$work/doctor")"
    run "${hard[@]}" rocm-attn-check:$image doctor >"$work/doctor" || fail "$(cat "$work/doctor")"
    ! grep -q PROBLEM "$work/doctor" || fail "$(cat "$work/doctor")"
done
holds "the doctor finds no problem, as both users, with AITER and without"
mkdir -m 0700 "$work/closed"
run --volume "$work/closed:/cache" rocm-attn-check:serve doctor >"$work/doctor" 2>&1 && fail "a closed /cache is no problem"
grep -q "PROBLEM  caches" "$work/doctor" || fail "the doctor does not name a closed /cache: $(cat "$work/doctor")"
grep -q "cannot write to" "$work/doctor" || fail "the entry point says nothing of a closed /cache"
holds "a /cache that its user cannot write to is told, at the start and by the doctor"

echo "== models and text"
run --entrypoint python3 --volume "$work:/out" --user 0 rocm-attn-check:ci -c \
    'import pathlib, shutil; from rocm_serve.models.loading import find_model; shutil.copy(find_model("smollm2"), "/out/smollm2.gguf")'
mkdir "$work/models"
mv "$work/smollm2.gguf" "$work/models/"
chmod a+rx "$work" "$work/models"
prompt="What is the capital of France?"
said=$(run "${hard[@]}" --volume "$work/models:/models:ro" rocm-attn-check:serve generate --model /models/smollm2.gguf \
    --max-new-tokens 16 "$prompt" 2>"$work/generate") || fail "generate: $(cat "$work/generate")"
[[ $said == *Paris* ]] || fail "generate says: $said"
holds "generate reads a model from /models under a read-only root"
run --volume "$work/models:/models:ro" rocm-attn-check:serve prewarm --arch gfx942 --provider triton --max-kv-len 64 \
    --max-batch-size 1 --capture-sizes 1 /models/smollm2.gguf >"$work/prewarm" 2>&1 || fail "prewarm: $(cat "$work/prewarm")"
holds "prewarm compiles for gfx942 from a GGUF file"
if run rocm-attn-check:serve generate --model smollm2 x >"$work/none" 2>&1; then fail "a model that is not there"; fi
holds "a model that the image does not have: $(tail -n 1 "$work/none")"

echo "== stopping"
# stops NAME OPTION...: a container that computes ends by itself when it is asked to, before Docker kills it.
stops() {
    local name=$NAME-$1 code
    shift
    "$docker" run --detach --label "$NAME" --name "$name" "${ONE_THREAD[@]}" --volume "$work/models:/models:ro" "$@" >/dev/null
    # Until the program itself says something.
    timeout 300 bash -c "until '$docker' logs '$name' 2>&1 | grep -q .; do sleep 0.2; done"
    "$docker" stop --time 120 "$name" >/dev/null
    code=$("$docker" inspect --format '{{.State.ExitCode}}' "$name")
    "$docker" rm --volumes "$name" >/dev/null
    echo "$code"
}
story=(rocm-attn-check:serve generate --model /models/smollm2.gguf --max-new-tokens 4000 "Tell a long story.")
code=$(stops plain "${story[@]}")
[ "$code" = 130 ] || fail "stopped with $code, 137 is killed"
code=$(stops init --init "${story[@]}")
[ "$code" = 130 ] || fail "stopped with $code under --init"
holds "docker stop ends what computes, with and without --init (130; 137 would be killed)"
[ "$("$docker" inspect --format '{{.Config.Healthcheck}}' rocm-attn-check:serve)" = "<nil>" ] || fail "a health check"
holds "no health check that is healthy while the program hangs"

echo "== the server"
# asks NAME WORDS MAX_TOKENS: a chat with the server in a container, from inside it, so that no network is needed.
asks() {
    "$docker" exec --interactive "$1" python3 - "$2" "$3" <<'PYTHON'
import json, os, sys, urllib.request
body = {"model": "smollm2", "max_tokens": int(sys.argv[2]), "temperature": 0}
body["messages"] = [{"role": "user", "content": sys.argv[1]}]
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ.get("ROCM_ATTN_API_KEYS", "")}
url = "http://127.0.0.1:8000/v1/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    choice = json.load(answer)["choices"][0]
print(choice["finish_reason"], choice["message"]["content"])
PYTHON
}
# gets NAME PATH: the status of a page of the server.
gets() {
    "$docker" exec "$1" python3 -c "import urllib.error as e, urllib.request as u
try: print(u.urlopen('http://127.0.0.1:8000$2').status)
except e.HTTPError as error: print(error.code)
except OSError: print('none')"
}
# ready NAME: wait until a server is.
ready() {
    timeout 600 bash -c "until [ \"\$('$docker' inspect --format '{{.State.Running}}' '$1')\" != true ] ||
        '$docker' exec '$1' python3 -c \"import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready')\" 2>/dev/null
    do sleep 0.5; done"
    [ "$(gets "$1" /ready)" = 200 ] || fail "the server is not ready: $("$docker" logs "$1" 2>&1 | tail -n 20)"
}
# Two requests are under way when it is told to stop.
drains() {
    local one two code
    asks "$1" "Count from one to ten." 60 >"$work/one" &
    one=$!
    asks "$1" "Tell a story." 60 >"$work/two" &
    two=$!
    timeout 300 bash -c "until '$docker' exec '$1' python3 -c \"import urllib.request as u
assert 'rocm_attn_running 2' in u.urlopen('http://127.0.0.1:8000/metrics').read().decode()\" 2>/dev/null; do sleep 0.2; done"
    "$docker" stop --time 300 "$1" >/dev/null
    wait $one || fail "a request was lost in the drain: $("$docker" logs "$1" 2>&1 | tail -n 5)"
    wait $two || fail "a request was lost in the drain: $("$docker" logs "$1" 2>&1 | tail -n 5)"
    code=$("$docker" inspect --format '{{.State.ExitCode}}' "$1")
    [ "$code" = 0 ] || fail "a server that has drained ended with $code"
}
server=$NAME-server
"$docker" run --detach --label "$NAME" --name "$server" "${ONE_THREAD[@]}" --init "${hard[@]}" --network none --env ROCM_ATTN_API_KEYS=of-this-check \
    --volume "$work/models:/models:ro" rocm-attn-check:serve serve --model /models/smollm2.gguf \
    --served-model-name smollm2 --max-kv-len 512 --host 0.0.0.0 --drain-seconds 300 >/dev/null
ready "$server"
said=$(asks "$server" "$prompt" 16)
[[ $said == *Paris* ]] || fail "the server says: $said"
[ "$(gets "$server" /health) $(gets "$server" /metrics) $(gets "$server" /v1/models)" = "200 200 401" ] ||
    fail "health, metrics and models without a key: $(gets "$server" /health) $(gets "$server" /metrics) $(gets "$server" /v1/models)"
holds "serve answers a chat as uid 10001, root read-only, no capabilities; /health and /metrics take no key, /v1 does"
drains "$server"
"$docker" rm --volumes "$server" >/dev/null
holds "docker stop drains: both requests under way have their answers, and the code is 0"
if run --network none rocm-attn-check:serve serve --model /models/none --host 0.0.0.0 >"$work/none" 2>&1; then
    fail "a server without keys listens where others reach it"
fi
holds "no server: $(tail -n 1 "$work/none")"

echo "== engines"
# shellcheck disable=SC2086 # options are words
"$docker" build --progress plain --file docker/Dockerfile.engine --build-arg ENGINE_IMAGE=rocm-attn-check:base \
    ${BUILD_OPTIONS:-} --tag rocm-attn-check:engine . >"$work/engine.log" 2>&1 || {
    tail -n 40 "$work/engine.log" >&2
    fail "an engine's image with the plug-in does not build"
}
before=$(run --entrypoint python3 rocm-attn-check:base -m pip freeze)
after=$(run --entrypoint python3 rocm-attn-check:engine -m pip freeze | grep -v '^rocm-attn')
[ "$before" = "$after" ] || fail "the plug-in has changed the engine's packages"
holds "an engine's image gets the plug-in and nothing else"

echo "== what is in it"
run --entrypoint cat rocm-attn-check:serve /opt/rocm-attn/versions.txt >"$work/versions"
for part in rocm-attn amd-aiter pybind11 torch triton aiter-commit "revision checked"; do
    grep -q "^$part" "$work/versions" || fail "versions.txt does not name $part: $(cat "$work/versions")"
done
label() { "$docker" inspect --format "{{index .Config.Labels \"$1\"}}" rocm-attn-check:serve; }
[ "$(label org.opencontainers.image.base.name)" = rocm-attn-check:base ] || fail "no label for the base"
[ "$(label org.opencontainers.image.revision)" = checked ] || fail "no label for the revision"
grep -q "^torch==" <(run --entrypoint cat rocm-attn-check:serve /opt/rocm-attn/constraints.txt) || fail "no constraints"
holds "versions.txt, labels and constraints: $(tr '\n' ';' <"$work/versions")"
must_build taken --build-context aiter=docker-image://rocm-attn-check:aiter \
    --build-arg AITER_REPOSITORY=/nowhere --build-arg AITER_COMMIT=none
holds "AITER is taken from an image that was built before"

echo "== compose"
compose() { MODELS=$work/models "$docker" compose --file docker/compose.yaml "$@"; }
unset RENDER_GID
for gid in "" 44 109; do
    for profile in rocm cuda server vllm sglang monitoring; do
        RENDER_GID=$gid compose --profile $profile config >"$work/compose" || fail "compose config $profile, RENDER_GID=$gid"
    done
    RENDER_GID=$gid compose --profile rocm down >/dev/null 2>&1 || fail "compose down, RENDER_GID=$gid"
    RENDER_GID=$gid compose ps >/dev/null || fail "compose ps, RENDER_GID=$gid"
done
[ "$(compose --profile rocm config rocm | sed -n 's/^ *source: //p' | grep -c "^$work/models$")" = 1 ] || fail "MODELS"
[ "$(MODELS='' "$docker" compose --file docker/compose.yaml --profile rocm config | grep -c "source: $PWD/models$")" = 1 ] ||
    fail "compose's models are not the checkout's"
# All of the service but the devices, and limits that not every machine may raise.
cat >"$work/no_gpu.yaml" <<'YAML'
services:
  rocm:
    image: rocm-attn-check:serve
    devices: !reset []
    ulimits: !reset {}
    network_mode: none
  server:
    image: rocm-attn-check:serve
    devices: !reset []
    ulimits: !reset {}
    network_mode: none
    ports: !reset []
    labels: ["${CHECK_LABEL}"]
volumes:
  rocm-cache:
    name: "${CHECK_VOLUME}"
    external: true
YAML
CHECK_VOLUME=$(volume_for compose)
export CHECK_VOLUME CHECK_LABEL=$NAME ROCM_ATTN_API_KEYS=of-this-check MODEL=smollm2.gguf
for command in "doctor" "generate --model /models/smollm2.gguf --max-new-tokens 16 France"; do
    # shellcheck disable=SC2086 # a command's words
    compose --file "$work/no_gpu.yaml" run --rm --label "$NAME=1" rocm $command >"$work/compose" 2>&1 ||
        fail "compose run rocm $command: $(cat "$work/compose")"
done
compose --file "$work/no_gpu.yaml" --profile rocm down --remove-orphans >/dev/null 2>&1
holds "compose: config, ps, down without RENDER_GID and with 44; run doctor and generate"
compose --file "$work/no_gpu.yaml" --profile server up --detach --wait >"$work/compose" 2>&1 ||
    fail "compose up server: $(cat "$work/compose")"
server=$("$docker" ps --quiet --filter "label=$NAME" | head -n 1)
[ "$("$docker" inspect --format '{{.State.Health.Status}}' "$server")" = healthy ] || fail "compose's server is not healthy"
compose --file "$work/no_gpu.yaml" --profile server stop >/dev/null 2>&1
[ "$("$docker" inspect --format '{{.State.ExitCode}}' "$server")" = 0 ] || fail "compose stop did not let the server end"
compose --file "$work/no_gpu.yaml" --profile server down --remove-orphans >/dev/null 2>&1
holds "compose: up --wait until the server is healthy, stop ends it with code 0"

echo "== its tests"
# tests STAGE: a stage of run_tests.sh in the image for CI. Prints the last lines.
tests() {
    DOCKER=$docker IMAGE=rocm-attn-check:ci CONTAINER=$NAME-tests REPORT_HOST=$NAME RUN_OPTIONS="--label $NAME" \
        bash docker/run_tests.sh "$1" >"$work/tests" 2>&1 || fail "run_tests.sh $1: $(tail -n 60 "$work/tests")"
    tail -n 4 "$work/tests"
}
tests host
holds "the tests that need no GPU pass in the image for CI"
tests rehearsal
report=$(sed -n 's/^the report: //p' "$work/tests")
[ -n "$report" ] || fail "no report: $(tail -n 20 "$work/tests")"
mkdir "$work/reports"
mv "$report" "$work/reports/report.json"
rmdir reports 2>/dev/null || true # it may hold reports of this machine
# As docs/rocm.md says. Another user's folder could not be removed here.
run --user "$(id -u):0" --volume "$work/reports:/src/reports" --entrypoint rocm-attn rocm-attn-check:ci read-report \
    reports/report.json --arch mi300x --folder reports/first_run >"$work/read" 2>&1 || fail "read-report: $(cat "$work/read")"
[ -s "$work/reports/first_run/differences.json" ] || fail "read-report wrote no differences: $(cat "$work/read")"
# The simulated driver states no registers. Nothing else differs: the GPU is the simulator itself.
! grep '^  ' "$work/read" | grep -v '^  registers: .* found 0$' || fail "read-report: $(cat "$work/read")"
holds "the small steps of docs/rocm.md run on a simulated MI300X, and their report is read: $(head -n 1 "$work/read")"

echo "== a run of tests that is cut off"
# The command line of run_tests.sh, with another workload that does not end by itself.
cat >"$work/hangs" <<HANGS
#!/usr/bin/env bash
if [ "\$1" = run ]; then
    set -- "\${@:1:\$#-2}" --entrypoint sleep rocm-attn-check:ci infinity
fi
exec "$docker" "\$@"
HANGS
chmod +x "$work/hangs"
DOCKER="$work/hangs" IMAGE=rocm-attn-check:ci CONTAINER=$NAME-tests RUN_OPTIONS="--label $NAME" \
    bash docker/run_tests.sh host >"$work/tests" 2>&1 &
tests=$!
timeout 300 bash -c "until '$docker' ps --quiet --filter name=$NAME-tests | grep -q .; do sleep 0.2; done"
kill -TERM $tests
code=0
wait $tests || code=$?
[ "$code" = 143 ] || fail "run_tests.sh ended with $code: $(cat "$work/tests")"
[ -z "$("$docker" ps --all --quiet --filter "name=$NAME-tests")" ] || fail "its container is still there"
holds "a job that is cancelled leaves no container behind"

echo "all $num_checks checks passed"
