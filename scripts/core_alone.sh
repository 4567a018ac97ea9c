#!/usr/bin/env bash
# The tests of the core, in a copy of the tree whose only plugin is `local`, the backend of a spec that names none.
# tests/plugins/test_without_plugins.py shows what the core does without `local` too.
#
#   scripts/core_alone.sh [PYTEST ARGUMENT...]
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z | xargs -0 cp -P --parents -t "$copy"
find "$copy"/engine/plugins -mindepth 1 -maxdepth 1 -type d ! -name local -exec rm -rf {} +
cd "$copy"
PYTHONPATH="$copy" python -m pytest -q tests/core "$@"
