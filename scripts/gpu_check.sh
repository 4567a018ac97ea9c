#!/usr/bin/env bash
# Checks on one GPU: attention, bfloat16 against float32, a 7B-shaped step, a training end to end, pushes to SGLang. Writes build/gpu.md.
#
#   scripts/gpu_check.sh                          all sections; about 10 minutes
#   scripts/gpu_check.sh --only attention --only bfloat16
#   scripts/gpu_check.sh --out FILE               another file than build/gpu.md
#   scripts/gpu_check.sh --rehearse               the same code with tiny sizes on the CPU; writes nothing
#
# Without a GPU nothing is run or written, and the exit status is 3. A section whose packages are missing says `not run: <package>`.
# Nothing is installed or downloaded. PYTHON names the interpreter; its torch and transformers are used as they are.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
