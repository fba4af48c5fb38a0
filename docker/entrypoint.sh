#!/bin/sh
# Readies the folder that AITER's modules are loaded from, then becomes the command: entrypoint.sh COMMAND...
#
# AITER imports what it compiles from $AITER_JIT_DIR, and with it everything else: modules that its wheel brought are
# linked there. A volume may be empty, or from another image, so this is done at each start; it takes milliseconds.
set -eu

modules=/opt/rocm-attn/aiter-modules
if [ -d "$modules" ]; then
    folder=$(readlink /opt/rocm-attn/aiter)/jit
    if mkdir -p "$folder" && [ -w "$folder" ]; then
        for module in "$modules"/*.so; do
            link=$folder/${module##*/}
            # What was compiled here for another GPU stays; a link whose module is gone does not.
            [ -e "$link" ] || ln -sf "$module" "$link"
        done
    else
        echo "rocm-attn: user $(id -u) cannot write to $folder; 'rocm-attn doctor' says what to do" >&2
    fi
fi
exec "$@"
