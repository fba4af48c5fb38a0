#!/usr/bin/env bash
# SGLang's gateway (PyPI: sglang-router) before servers of any engine that speaks OpenAI's API; docs/scale.md explains it:
#   bash docker/gateway/run.sh http://127.0.0.1:8001 http://127.0.0.1:8002
#
#   GATEWAY_HOST     where it listens (127.0.0.1)
#   GATEWAY_PORT     (8000)
#   METRICS_PORT     its own counts, for Prometheus, on the same address (29000)
#   GATEWAY_POLICY   cache_aware, or round_robin to compare (cache_aware)
#   PYTHON           the interpreter that has sglang-router (python3)
set -euo pipefail

if [ $# = 0 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

options=(
    --host "${GATEWAY_HOST:-127.0.0.1}" --port "${GATEWAY_PORT:-8000}"
    --prometheus-host "${GATEWAY_HOST:-127.0.0.1}" --prometheus-port "${METRICS_PORT:-29000}"
    --worker-urls "$@"
    # A request goes where the longest beginning of its text went before, if that is a tenth of it; else, or where one
    # server has 8 requests and half again more than another, to the server with fewer. Its defaults (0.3, 64) wait for
    # more, which suits servers that take hundreds.
    --policy "${GATEWAY_POLICY:-cache_aware}" --cache-threshold 0.1 --balance-abs-threshold 8 --balance-rel-threshold 1.5
    # /ready is 503 while a server drains, and no request is sent there after one such answer.
    --health-check-endpoint /ready --health-check-interval-secs 1 --health-check-timeout-secs 3
    --health-failure-threshold 1 --health-success-threshold 1
    # Servers are waited for while they read their weights.
    --worker-startup-check-interval 1 --worker-startup-timeout-secs 3600
    # A request whose answer has not begun is sent again: no connection, a broken one, 408, 429, 500, 502, 503, 504.
    --retry-max-retries 5 --retry-initial-backoff-ms 100 --retry-max-backoff-ms 2000 --retry-backoff-multiplier 2
    # A server that fails three times in a row gets nothing for five seconds, then one request.
    --cb-failure-threshold 3 --cb-success-threshold 1 --cb-timeout-duration-secs 5
    # More than the servers' own --deadline-seconds, so that theirs decides.
    --request-timeout-secs 660
    # In-flight requests may end when the gateway itself is stopped.
    --shutdown-grace-period-secs 60
    --log-level warn
)
exec "${PYTHON:-python3}" -m sglang_router.launch_router "${options[@]}"
