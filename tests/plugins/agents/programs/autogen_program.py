"""AutoGen's AssistantAgent. Argument: `streamed` or `whole`."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from task import MODEL, QUESTION, add, reward

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "family": "unknown",
    "structured_output": False,
    "multiple_system_messages": True,
}


async def main():
    agent = AssistantAgent(
        "adder",
        OpenAIChatCompletionClient(model=MODEL, model_info=INFO),
        tools=[add],
        system_message="Add.",
        max_tool_iterations=2,
        model_client_stream=sys.argv[1] == "streamed",
    )
    first = await agent.run(task=QUESTION)
    assert "42" in first.messages[-1].content, first.messages
    second = await agent.run(task="Are you sure?")
    assert second.messages[-1].content == "Yes.", second.messages
    reward()


asyncio.run(main())
