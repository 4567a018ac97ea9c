"""openai-agents. Arguments: `responses` or `chat`, and `streamed` or `whole`."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from task import MODEL, QUESTION, add, reward

set_tracing_disabled(True)
api, streamed = sys.argv[1], sys.argv[2] == "streamed"
model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI()) if api == "chat" else MODEL
agent = Agent(name="adder", instructions="Add.", model=model, tools=[function_tool(add)])


async def run(given):
    if not streamed:
        return await Runner.run(agent, given)
    result = Runner.run_streamed(agent, given)
    kinds = [event.type async for event in result.stream_events()]
    assert "run_item_stream_event" in kinds, kinds
    return result


async def main():
    first = await run(QUESTION)
    assert "42" in first.final_output, first.final_output
    second = await run([*first.to_input_list(), {"role": "user", "content": "Are you sure?"}])
    assert second.final_output == "Yes.", second.final_output
    reward()


asyncio.run(main())
