#!/usr/bin/env bash
# Makes the folders that an image's user writes to: lay_out.sh UID. Run once, as root, while the image is built.
set -euo pipefail

own=/opt/rocm-attn
chmod 755 $own/*.sh
mkdir -p /cache/triton /cache/other
folder=$(python3 $own/contents.py aiter-cache)
if [ -n "$folder" ]; then
    ln -s "$(python3 $own/contents.py aiter-modules)" $own/aiter-modules
    # One place for all images, and a folder of its own in a shared cache for each AITER that compiles into it.
    ln -s "/cache/$folder" $own/aiter
    # So that a volume that starts as a copy of /cache has them before the first container is run.
    $own/entrypoint.sh true
fi
# Group 0: platforms that run an image under a user of their own choice put that user into it.
chown -R "$1:0" /cache /home/server
chmod -R g=u /cache /home/server
python3 $own/contents.py versions >$own/versions.txt
cat $own/versions.txt
