"""litellm. Argument: its provider, `openai` or `hosted_vllm` (Chat Completions), or `anthropic` (Messages)."""

import json
import os
import sys

import litellm
from task import MODEL, QUESTION, add, reward

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
provider = sys.argv[1]
base = os.environ["ANTHROPIC_BASE_URL" if provider == "anthropic" else "OPENAI_BASE_URL"]
history = [{"role": "system", "content": "Add."}, {"role": "user", "content": QUESTION}]
for _ in range(2):
    made = litellm.completion(
        f"{provider}/{MODEL}", messages=history, tools=TOOLS, api_base=base, api_key=os.environ["OPENAI_API_KEY"]
    )
    message = made.choices[0].message
    history.append(message)
    for call in message.tool_calls or ():
        result = add(**json.loads(call.function.arguments))
        history.append({"role": "tool", "tool_call_id": call.id, "content": result})
assert "42" in message.content, message
reward()
