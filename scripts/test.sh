#!/usr/bin/env bash
# The default test run, with all its set-up: a virtual environment in .venv unless one is active already.
#
#   scripts/test.sh [arguments of pytest]
#   scripts/test.sh all      every test: .ci/run with those that it leaves out (CONTRIBUTING.md)
set -euo pipefail
cd "$(dirname "$0")/.."
[ "${1:-}" != all ] || exec .ci/run all
if [ -z "${VIRTUAL_ENV:-}" ]; then
  [ -x .venv/bin/python ] || python3 -m venv .venv
  # shellcheck disable=SC1091
  . .venv/bin/activate
fi
python -c 'import engine, pytest, hypothesis' 2>/dev/null || pip install --quiet -c constraints.txt -c tests/constraints.txt -e '.[dev,train]'
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
exec pytest -q "$@"
