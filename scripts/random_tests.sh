#!/usr/bin/env bash
# Runs the property tests with new random examples, in rounds, until one fails. The default test run uses fixed examples.
#
#   scripts/random_tests.sh [ROUNDS] [arguments of pytest]     3 rounds when left out
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f .venv/bin/activate ]; then
  # shellcheck disable=SC1091
  . .venv/bin/activate
fi
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
rounds=${1:-3}
shift || true
for round in $(seq "$rounds"); do
  echo "round $round of $rounds"
  pytest -q -m 'hypothesis and not model and not sglang' --hypothesis-profile=random "$@"
done
