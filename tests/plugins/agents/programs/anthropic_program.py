"""anthropic. Argument: `loop`, `streamed` (both send thinking back), `dropped` (without thinking), or `runner` (its tool runner)."""

import sys

import anthropic
from task import MODEL, QUESTION, add, reward

TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
THINKING = {"type": "enabled", "budget_tokens": 1024}
how = sys.argv[1]
client = anthropic.Anthropic()
asked = {"model": MODEL, "max_tokens": 2048, "system": [{"type": "text", "text": "Add."}]}


def ask(history):
    request = asked | {"messages": history, "tools": [TOOL], "thinking": THINKING}
    if how != "streamed":
        return client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        return stream.get_final_message()


if how == "runner":
    runner = client.beta.messages.tool_runner(
        **asked, thinking=THINKING, tools=[anthropic.beta_tool(add)], messages=[{"role": "user", "content": QUESTION}]
    )
    message = runner.until_done()
else:
    history = [{"role": "user", "content": QUESTION}]
    while (message := ask(history)).stop_reason == "tool_use":
        kept = [block for block in message.content if how != "dropped" or block.type != "thinking"]
        calls = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": add(**call.input)} for call in calls]
        history += [{"role": "assistant", "content": kept}, {"role": "user", "content": results}]
        counted = client.messages.count_tokens(
            model=MODEL, messages=history, system=asked["system"], tools=[TOOL], thinking=THINKING
        )
    assert counted.input_tokens == message.usage.input_tokens, (counted, message.usage)
assert "42" in message.content[-1].text, message
reward()
