#!/usr/bin/env bash
# The tests of the core, in a copy of the tree without any folder of engine/plugins: the core needs none of them.
#
#   scripts/core_alone.sh [PYTEST ARGUMENT...]
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z | xargs -0 cp -P --parents -t "$copy"
rm -rf "$copy"/engine/plugins/*/
cd "$copy"
PYTHONPATH="$copy" python -m pytest -q tests/core "$@"
