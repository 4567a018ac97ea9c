#!/usr/bin/env bash
# Virtual environments for the tests that run other trainers' own code on a CPU, one each, and those tests.
#
#   scripts/trainer_envs.sh install [NAME...]     skyrl, areal, verl, client, s3; all of them without a name
#   scripts/trainer_envs.sh env                   prints an `export` line for each environment that is installed
#   scripts/trainer_envs.sh test [NAME... | trl]  installs what is missing, and runs the tests; needs the extras dev and train
#
# An environment has the requirements of the engine and of the trainer, and not the engine: tests put the checkout on the path. `client` has
# only httpx and pyarrow, and `s3` has Ray and a local object store. One that has its packages already is left as it is. A trainer's model servers and CUDA builds are not installed.
#
# Environment:
#   TRAINER_ENVS   the folder of the environments (default: $EPISODE_ENGINE_CACHE/trainer-envs)
#   PYTHON         the interpreter that makes them (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."
# Where a CPU build of torch may lie: uv does not read pip's settings.
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$("${PYTHON:-python3}" -m pip config get global.find-links 2>/dev/null || true)}}"
folder="${TRAINER_ENVS:-${EPISODE_ENGINE_CACHE:-$HOME/.cache/episode-engine}/trainer-envs}"
names=(skyrl areal verl client s3)

packages() {
  case "$1" in
    skyrl) echo skyrl==0.3.0 skyrl-gym==0.4.0 ray==2.56.0 hydra-core==1.3.2 omegaconf aiohttp loguru jaxtyping tensordict torchdata func_timeout ;;
    areal) # what AReaL imports on the way to its advantages, in the versions that it pins; trackers too, because it imports them first
      echo transformers==5.3.0 omegaconf==2.4.0.dev2 hydra-core==1.4.0.dev1 math-verify==0.8.0 swanlab==0.6.12 trackio wandb tensorboardx \
        'ray[default]' torchdata datasets colorlog einops tenacity flask lark uvloop numba aiofiles aiohttp fastapi uvicorn openai anthropic \
        tabulate pybase64 setproctitle nvidia-ml-py pyzmq psutil pebble redis sentencepiece 'peft<=0.18.1' python-dotenv matplotlib seaborn ;;
    verl) echo verl==0.9.1 'cachetools>=5' TransferQueue fastapi uvicorn ;;
    client) echo httpx pyarrow ;;
    s3) echo 'ray>=2.52,<3' s3fs 'moto[server]' ;;
    *) echo "trainer_envs.sh: unknown environment $1; one of: ${names[*]}" >&2; exit 2 ;;
  esac
}

alone() { # packages without their dependencies, which pin an older torch and CUDA builds
  case "$1" in areal) echo areal==1.0.4 ;; esac
}

requirements() { # of the engine
  "${PYTHON:-python3}" -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))'
}

find_uv() { # pip takes minutes to resolve some of these, or finds nothing
  if command -v uv; then return; fi
  if [ ! -x "$folder/uv/bin/uv" ]; then
    "${PYTHON:-python3}" -m venv "$folder/uv"
    "$folder/uv/bin/pip" install --quiet --disable-pip-version-check uv
  fi
  echo "$folder/uv/bin/uv"
}

install() {
  local name=$1 wanted uv
  packages "$name" >/dev/null || exit
  wanted="$(packages "$name") $(alone "$name")"
  [ "$name" = client ] || wanted+=" $(requirements)"
  if [ "$(cat "$folder/$name/installed" 2>/dev/null)" != "$wanted" ]; then
    uv="$(find_uv)"
    rm -rf "${folder:?}/$name"
    "$uv" venv --quiet --python "${PYTHON:-python3}" "$folder/$name"
    local pip=("$uv" pip install --quiet --prerelease if-necessary-or-explicit --python "$folder/$name/bin/python")
    # shellcheck disable=SC2046  # several words
    if [ "$name" = client ]; then
      "${pip[@]}" $(packages client)
    else
      requirements | "${pip[@]}" -c constraints.txt -r - $(packages "$name")
    fi
    # shellcheck disable=SC2046
    [ -z "$(alone "$name")" ] || "${pip[@]}" --no-deps $(alone "$name")
    echo "$wanted" > "$folder/$name/installed"
  fi
  echo "$folder/$name/bin/python"
}

environment() { # the variables that the tests read
  local name
  for name in "${names[@]}"; do
    if [ -f "$folder/$name/installed" ]; then echo "export ${name^^}_PYTHON=$folder/$name/bin/python"; fi
  done
}

tests_of() { # the words of `pytest -k` that select the tests of an environment among those marked `trainers` or `ray`
  case "$1" in
    trl) echo _trl ;;
    client) echo client_alone ;;
    s3) echo object_store ;;
    *) packages "$1" >/dev/null && echo "_$1" ;;
  esac
}

command="${1:-}"
[ $# = 0 ] || shift
case "$command" in
  install)
    [ $# -gt 0 ] || set -- "${names[@]}"
    for name in "$@"; do install "$name"; done
    ;;
  env) environment ;;
  test)
    [ $# -gt 0 ] || set -- trl "${names[@]}"
    words=""
    for name in "$@"; do
      [ "$name" = trl ] || install "$name"
      words+="${words:+ or }$(tests_of "$name")"
    done
    eval "$(environment)"
    exec pytest -q -m "trainers or ray" -k "$words"
    ;;
  *) sed -n '2,17s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
