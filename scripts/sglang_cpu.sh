#!/usr/bin/env bash
# The real SGLang server on a CPU: for tests, and for trying things out without a GPU.
#
#   scripts/sglang_cpu.sh install                       its own virtual environment (about 3 GB, 2 minutes)
#   scripts/sglang_cpu.sh start MODEL_DIR [--port P] [--deterministic] [more flags of SGLang's server]
#   scripts/sglang_cpu.sh stop [--port P]               without a port: every server that was started here
#   scripts/sglang_cpu.sh status
#   scripts/sglang_cpu.sh python                        prints the environment's interpreter
#
# Environment:
#   SGLANG_CPU_VENV       the virtual environment   (default: $EPISODE_ENGINE_CACHE/sglang-cpu)
#   SGLANG_CPU_STATE      pid files and logs        (default: $EPISODE_ENGINE_CACHE/sglang-cpu-servers)
#   SGLANG_CPU_DEADLINE   seconds that a start may take (default: 300)
#   TORCH_INDEX_URL       where torch comes from; an index of CPU builds saves some gigabytes (default: pip's own)
#   PYTHON                the interpreter that makes the environment (default: the first python3.11+ found)
#
# `--deterministic` makes a request's sampling_seed count (SGLang ignores it otherwise).
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
stand_ins="$here/sglang_cpu"
cache="${EPISODE_ENGINE_CACHE:-$HOME/.cache/episode-engine}"
venv="${SGLANG_CPU_VENV:-$cache/sglang-cpu}"
state="${SGLANG_CPU_STATE:-$cache/sglang-cpu-servers}"
deadline="${SGLANG_CPU_DEADLINE:-300}"
recipe=1 # raised when the pins below change, so that an old environment is brought up to date

die() {
    echo "sglang_cpu.sh: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.12 python3.11 python3 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or 3.12 with the venv module; install one, or name it in PYTHON=/path/to/python3.11"
}

install() {
    [ "$(uname -s)" = Linux ] || die "SGLang runs on Linux alone"
    if [ "$(cat "$venv/.recipe" 2>/dev/null)" = "$recipe" ]; then
        echo "already installed: $venv"
        return
    fi
    local python
    python="$(find_python)"
    echo "installing SGLang for the CPU into $venv with $python"
    mkdir -p "$(dirname "$venv")"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 5)
    "${pip[@]}" torch==2.13.0 ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
    "${pip[@]}" transformers==5.19.0 tokenizers==0.23.2 aiohttp fastapi 'uvicorn>=0.51' uvloop orjson msgspec pyzmq pydantic \
        psutil requests pillow numpy scipy einops setproctitle prometheus-client python-multipart partial_json_parser interegular \
        pybase64 xxhash zstandard sentencepiece==0.2.1 tiktoken IPython openai==2.8.0 anthropic distro dill cloudpickle loguru gguf \
        jsonschema cffi opentelemetry-api
    # Without dependencies: theirs pin CUDA builds, and what is needed of them stands above.
    "${pip[@]}" --no-deps sglang==0.5.23 triton==3.9.0 torchvision==0.28.0 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 \
        'llguidance>=1.7.6,<2' openai-harmony==0.0.4 xgrammar==0.2.7 soundfile==0.13.1 sglang-router==0.3.2
    PYTHONPATH="$stand_ins" SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c 'import sgl_kernel, sglang.srt.server_args' ||
        die "installed, but SGLang does not import; remove $venv and try again"
    echo "$recipe" >"$venv/.recipe"
    echo "installed: $venv"
}

alive() { # pid file -> is that server's process there, and still ours?
    local pid
    pid="$(cat "$1" 2>/dev/null)" || return 1
    [ -n "$pid" ] && [ -r "/proc/$pid/cmdline" ] && tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q "sglang_cpu/launch.py"
}

free_port() { # below the ports that Linux gives to programs that ask for any: one of them could take it before the server does
    "$venv/bin/python" - <<'PY'
import contextlib, random, socket
while True:
    port = random.randrange(20000, 32768)
    with socket.socket() as trial, contextlib.suppress(OSError):
        trial.bind(("127.0.0.1", port))
        print(port)
        break
PY
}

start() {
    [ $# -ge 1 ] || die "start needs the model's folder: sglang_cpu.sh start MODEL_DIR [--port P] [flags]"
    local model="$1" port="" flags=()
    shift
    while [ $# -gt 0 ]; do
        case "$1" in
        --port) port="${2:-}"; shift 2 || die "--port needs a number" ;;
        --deterministic) flags+=(--enable-deterministic-inference); shift ;;
        *) flags+=("$1"); shift ;;
        esac
    done
    [ -f "$model/config.json" ] || die "no model in $model: it has no config.json"
    [ -x "$venv/bin/python" ] || die "SGLang is not installed in $venv; run: scripts/sglang_cpu.sh install"
    mkdir -p "$state"
    if [ -n "$port" ]; then
        launch "$model" "$port" "${flags[@]}" || exit 1
    else # a port that was free a moment ago, or one of those that the server takes for itself, can be gone
        launch "$model" "$(free_port)" "${flags[@]}" || launch "$model" "$(free_port)" "${flags[@]}" || exit 1
    fi
}

launch() { # model, port, flags: prints the server's URL once it answers
    local model="$1" port="$2"
    shift 2
    local pid_file="$state/$port.pid" log="$state/$port.log"
    if alive "$pid_file"; then
        echo "sglang_cpu.sh: a server runs on port $port already (pid $(cat "$pid_file")); stop it first" >&2
        return 1
    fi
    PYTHONPATH="$stand_ins" SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TORCHDYNAMO_DISABLE=1 \
        setsid nohup "$venv/bin/python" "$stand_ins/launch.py" \
        --model-path "$model" --device cpu --attention-backend torch_native --sampling-backend pytorch \
        --dtype float32 --host 127.0.0.1 --port "$port" --max-total-tokens 16384 \
        --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled \
        --skip-server-warmup --sleep-on-idle "$@" \
        >"$log" 2>&1 </dev/null &
    local pid=$!
    disown "$pid"
    echo "$pid" >"$pid_file"
    local began=$SECONDS
    until "$venv/bin/python" - "$port" <<'PY' 2>/dev/null; do
import sys, urllib.request
raise SystemExit(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=25).status != 200)
PY
        if ! kill -0 "$pid" 2>/dev/null; then
            rm -f "$pid_file"
            tail -n 40 "$log" >&2
            echo "sglang_cpu.sh: the server died while it started; the end of $log stands above" >&2
            return 1
        fi
        if [ $((SECONDS - began)) -ge "$deadline" ]; then
            tail -n 40 "$log" >&2
            stop_one "$pid_file" >&2
            echo "sglang_cpu.sh: the server did not answer within $deadline s; the end of $log stands above" >&2
            return 1
        fi
        sleep 1
    done
    echo "http://127.0.0.1:$port"
}

stop_one() {
    local pid_file="$1" pid
    if alive "$pid_file"; then
        pid="$(cat "$pid_file")"
        kill -TERM -- "-$pid" 2>/dev/null || kill -TERM "$pid" 2>/dev/null || true
        for _ in $(seq 50); do
            kill -0 -- "-$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL -- "-$pid" 2>/dev/null || true
        echo "stopped $(basename "$pid_file" .pid)"
    fi
    rm -f "$pid_file"
}

each_server() { # every pid file, or the one of `--port P`
    if [ "${1:-}" = --port ]; then
        [ -e "$state/${2:?--port needs a number}.pid" ] && echo "$state/$2.pid"
        return 0
    fi
    find "$state" -maxdepth 1 -name '*.pid' 2>/dev/null | sort
}

command="${1:-}"
[ $# -gt 0 ] && shift
case "$command" in
install) install ;;
start) start "$@" ;;
stop) for file in $(each_server "$@"); do stop_one "$file"; done ;;
status)
    for file in $(each_server); do
        if alive "$file"; then
            echo "http://127.0.0.1:$(basename "$file" .pid) pid $(cat "$file")"
        else
            rm -f "$file"
        fi
    done
    ;;
python) echo "$venv/bin/python" ;;
*)
    sed -n '2,17p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//' >&2
    exit 2
    ;;
esac
