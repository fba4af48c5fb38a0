# Sourced by the scripts that build or run images.
# shellcheck shell=bash

# needs_docker COMMAND: ends the script, in a sentence, where no engine answers the command.
needs_docker() {
    "$1" version >/dev/null 2>&1 && return
    echo "'$1 version' fails, so no Docker engine answers on this machine; install or start Docker 23 or later with" \
        "buildx, set DOCKER to a command that reaches one, or run the tests without an image: bash scripts/test.sh" >&2
    exit 2
}

# needs_plugin COMMAND PLUGIN: ends the script, in a sentence, where Docker's command lacks buildx or compose.
needs_plugin() {
    "$1" "$2" version >/dev/null 2>&1 && return
    echo "'$1 $2' is missing; install it: docker-$2-plugin of Docker, or docker-$2 of Debian 13 or later" >&2
    exit 2
}
