#!/usr/bin/env bash
# Talks to a running gateway with curl: models, an answer, a stream, a published system prompt.
#
#   examples/curl.sh [http://127.0.0.1:8080]
set -euo pipefail

url="${1:-http://127.0.0.1:8080}"
auth=(-H "Authorization: Bearer ${BATON_API_KEY:-unused}")
json=(-H "Content-Type: application/json")

echo "== models"
curl -sS --fail-with-body "${auth[@]}" "$url/v1/models"

echo; echo "== one answer"
curl -sS --fail-with-body "${auth[@]}" "${json[@]}" "$url/v1/chat/completions" -d '{
  "model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": 32,
  "messages": [{"role": "user", "content": "What is the capital of France?"}]
}'

echo; echo "== the same, token by token"
curl -sSN --fail-with-body "${auth[@]}" "${json[@]}" "$url/v1/chat/completions" -d '{
  "model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": 32, "stream": true,
  "stream_options": {"include_usage": true},
  "messages": [{"role": "user", "content": "What is the capital of France?"}]
}'

echo "== a system prompt computed ahead, used by every request that begins with it"
system='{"role": "system", "content": "You are a friendly guide to the city of Paris. You answer in two short sentences."}'
curl -sS --fail-with-body "${auth[@]}" "${json[@]}" "$url/v1/prefixes" \
  -d "{\"name\": \"paris-guide\", \"messages\": [$system]}"
echo
curl -sS --fail-with-body "${auth[@]}" "${json[@]}" "$url/v1/chat/completions" -d "{
  \"model\": \"SmolLM2-135M-Instruct\", \"temperature\": 0, \"max_tokens\": 32,
  \"messages\": [$system, {\"role\": \"user\", \"content\": \"What should I see first?\"}]
}"
echo
curl -sS --fail-with-body "${auth[@]}" -X DELETE "$url/v1/prefixes/paris-guide"
echo
