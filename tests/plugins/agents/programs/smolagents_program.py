"""smolagents. Argument: `tools` or `code`."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from task import MODEL, QUESTION, add, reward

model = OpenAIServerModel(MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = ToolCallingAgent if sys.argv[1] == "tools" else CodeAgent
answer = kind(tools=[tool(add)], model=model, max_steps=4, verbosity_level=2).run(QUESTION)
assert str(answer) == "42", answer
reward()
