# curl: one request to each API, without a stream and with one.
set -eu
chat() {
  curl --silent --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H 'Content-Type: application/json' -d "$1"
}
ask='{"role": "user", "content": "Q"}'
chat "{\"model\": \"$OPENAI_MODEL\", \"messages\": [$ask]}" | grep -q '"content": "one"'
chat "{\"model\": \"$OPENAI_MODEL\", \"messages\": [$ask, {\"role\": \"assistant\", \"content\": \"one\"}, $ask], \"stream\": true}" |
  grep -q 'data: \[DONE\]'
curl --silent --fail-with-body "$OPENAI_BASE_URL/responses" -H "Authorization: Bearer $OPENAI_API_KEY" \
  -d "{\"model\": \"$OPENAI_MODEL\", \"input\": \"R\"}" | grep -q '"text": "three"'
curl --silent --fail-with-body "$ANTHROPIC_BASE_URL/v1/messages" -H "x-api-key: $ANTHROPIC_API_KEY" \
  -H 'anthropic-version: 2023-06-01' -d "{\"model\": \"$ANTHROPIC_MODEL\", \"max_tokens\": 9, \"messages\": [$ask]}" |
  grep -q '"text": "four"'
echo 1.0 > "$EPISODE_REWARD_FILE"
