"""langgraph with langchain-openai. Arguments: `responses` or `chat`, and `streamed` or `whole`."""

import sys

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from task import MODEL, QUESTION, add, reward

api, streamed = sys.argv[1], sys.argv[2] == "streamed"
model = ChatOpenAI(model=MODEL, use_responses_api=api == "responses", streaming=streamed)
agent = create_react_agent(model, [add], prompt="Add.")
said = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
said = agent.invoke({"messages": [*said, ("user", "Are you sure?")]})["messages"]
content = said[-1].content
assert "Yes." in (content if isinstance(content, str) else content[-1]["text"]), content
reward()
