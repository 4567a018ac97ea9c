#!/usr/bin/env bash
# Virtual environments with the packages that agent programs use, one environment each, for the tests marked `agents`.
#
#   scripts/agent_packages.sh                     # all of them, under .agents/
#   scripts/agent_packages.sh anthropic           # one of them: .agents/anthropic
#   AGENT_PACKAGES=/elsewhere scripts/agent_packages.sh smolagents
#
# An environment that has its versions already is left as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${AGENT_PACKAGES:-$PWD/.agents}"

packages() {
  case "$1" in
    openai-agents) echo openai-agents==0.24.0 ;;
    smolagents) echo 'smolagents[openai]==1.26.0' ;;
    langgraph) echo langgraph==1.2.22 langchain-openai==1.7.3 ;;
    mini-swe-agent) echo mini-swe-agent==2.4.6 litellm==1.106.2 mcp ;;  # litellm needs mcp for requests with tools
    anthropic) echo anthropic==2.12.0 ;;
    autogen) echo autogen-agentchat==0.7.5 'autogen-ext[openai]==0.7.5' ;;
    *) echo "unknown package $1; one of: ${names[*]}" >&2; exit 2 ;;
  esac
}

names=(openai-agents smolagents langgraph mini-swe-agent anthropic autogen)
if [ $# = 0 ]; then
  printf '%s\n' "${names[@]}" | xargs -P 2 -n 1 "$PWD/scripts/agent_packages.sh"
  exit
fi
for name in "$@"; do
  wanted="$(packages "$name")"
  if [ "$(cat "$folder/$name/installed" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "${folder:?}/$name"
    python3 -m venv "$folder/$name"
    # shellcheck disable=SC2086  # several words
    "$folder/$name/bin/pip" install --quiet --disable-pip-version-check $wanted
    echo "$wanted" > "$folder/$name/installed"
  fi
  echo "$folder/$name/bin/python"
done
