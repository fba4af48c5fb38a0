#!/usr/bin/env bash
# Fails where something holds memory of an AMD GPU: tests would fail for want of it, or be measured beside it.
#   gpu_is_free.sh [SYSFS]     SYSFS: /sys
set -euo pipefail

sysfs=${1:-/sys}
# What the driver and an idle desktop hold; a process that uses the GPU takes gigabytes.
readonly ALLOWED_MIB=2048
found=0 held=0
for used in "$sysfs"/class/drm/card*/device/mem_info_vram_used; do
    [ -e "$used" ] || continue
    found=$((found + 1))
    card=${used%/device/*}
    mib=$(($(<"$used") >> 20))
    echo "${card##*/}: $mib of $(($(<"${used%_used}_total") >> 20)) MiB in use"
    [ "$mib" -le $ALLOWED_MIB ] || held=$((held + 1))
done
if [ $found = 0 ]; then
    echo "no AMD GPU is listed under $sysfs/class/drm" >&2
    exit 1
fi
if [ $held != 0 ]; then
    echo "$held of $found GPUs are in use; processes that opened one:" >&2
    find "$sysfs/class/kfd/kfd/proc" -mindepth 1 -maxdepth 1 -printf '%f ' >&2 2>/dev/null || true
    echo >&2
    exit 1
fi
