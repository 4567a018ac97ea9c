"""Tools: what the model is shown of them, and what comes of each attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

import pytest

from engine.actions.calling.workers import Workers
from engine.actions.toolbox import Toolbox, bind_tool
from engine.errors import EngineError, SpecCodeError
from engine.schemas.environment import EpisodeView, Task, ToolReply
from engine.schemas.message import MalformedCall, ToolCall
from engine.schemas.reward import RewardEvent
from engine.spec.code.signature import read_docstring, shape_of


def search(query: str, limit: int = 5, order: Literal["new", "old"] = "new") -> str:
    """Search the archive.

    It holds everything.

    Args:
        query: What to look for;
            several words are all needed.
        limit: Most results.
        order: Newest or oldest first.

    Returns:
        One result a line.
    """
    return f"{query}/{limit}/{order}"


async def slow(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


def fails(x: int) -> str:
    """Fail."""
    raise ValueError(f"{x} is too much")


def peek(view: EpisodeView, word: str) -> ToolReply:
    """Look at the episode."""
    return ToolReply(content=f"{word} {view.task.id}", rewards=[RewardEvent(value=0.5)], facts={"peeked": True})


def numbers() -> dict[str, list[int]]:
    """Give numbers."""
    return {"n": [1, 2]}


VIEW = EpisodeView(
    episode_id="t/0", task=Task(id="t", index=0, fields={}), seed=1, messages=(), turn=2, user_turn=0,
    calls=(), malformed=(), finish="stop", facts={}, rewards=(),
)  # fmt: skip


def call(name: str, index: int = 0, **arguments: object) -> ToolCall:
    return ToolCall(id=f"call_2_{index}", name=name, arguments=arguments)


@pytest.fixture
async def box() -> AsyncIterator[Toolbox]:
    workers = Workers(4)
    tools = [search, slow, fails, peek, numbers]
    yield Toolbox([bind_tool(tool, name=None, seconds=0.3, effects="pure", where="tools") for tool in tools], workers)
    workers.close()


def test_schema_comes_from_signature_and_docstring() -> None:
    assert shape_of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the archive. It holds everything.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for; several words are all needed."},
                    "limit": {"type": "integer", "default": 5, "description": "Most results."},
                    "order": {
                        "type": "string",
                        "enum": ["new", "old"],
                        "default": "new",
                        "description": "Newest or oldest first.",
                    },
                },
                "required": ["query"],
            },
        },
    }


def test_a_parameter_called_title_keeps_its_name() -> None:
    def find(title: str) -> str:
        """Find a book."""
        return title

    assert shape_of(find).schema["function"]["parameters"]["properties"] == {"title": {"type": "string"}}


def test_the_view_is_hidden_from_the_model() -> None:
    shape = shape_of(peek)
    assert shape.view == "view"
    assert list(shape.schema["function"]["parameters"]["properties"]) == ["word"]


def test_methods_and_callable_objects_are_tools() -> None:
    class Counter:
        """Counts."""

        def __call__(self, by: int) -> int:
            """Count on."""
            return by

        def reset(self, to: int) -> int:
            """Start again."""
            return to

    assert shape_of(Counter()).schema["function"]["name"] == "Counter"
    assert shape_of(Counter()).schema["function"]["description"] == "Count on."
    assert list(shape_of(Counter().reset).arguments.model_fields) == ["to"]


def test_docstrings_without_sections_are_all_description() -> None:
    assert read_docstring("One line.") == ("One line.", {})
    assert read_docstring("") == ("", {})


@pytest.mark.parametrize(
    "source", ["def t(a): ...", "def t(*a: int): ...", "def t(**a: int): ...", "def t(a: int, /): ..."]
)
def test_functions_that_cannot_be_called_by_name_are_refused(source: str) -> None:
    space: dict[str, object] = {}
    exec(source, space)
    with pytest.raises(EngineError, match="tools: tool `t`: "):
        bind_tool(space["t"], name=None, seconds=1, effects="pure", where="tools")


async def test_calls_run_at_once_and_results_come_in_their_order() -> None:
    last_came = asyncio.Event()

    async def first() -> str:
        """Wait for the last call."""
        await last_came.wait()
        return "first"

    async def last() -> str:
        """Let the first call go on."""
        last_came.set()
        return "last"

    workers = Workers(4)
    tools = [bind_tool(tool, name=None, seconds=60, effects="pure", where="tools") for tool in (first, search, last)]
    calls = [call("first", 0), call("search", 1, query="q"), call("last", 2)]
    results = (await Toolbox(tools, workers).call_all(calls, VIEW.turn, lambda: VIEW, budget=9)).results
    workers.close()
    assert [(r.call_id, r.content, r.error) for r in results] == [
        ("call_2_0", "first", None),
        ("call_2_1", "q/5/new", None),
        ("call_2_2", "last", None),
    ]


async def test_every_attempt_has_a_result_that_says_what_to_do(box: Toolbox) -> None:
    attempts = [
        call("serch", 0, query="q"),
        MalformedCall(raw="{", problem="The JSON ends too early."),
        call("search", 2, limit="many", colour="red"),
        call("fails", 3, x=7),
        call("slow", 4, seconds=5),
        call("search", 5, query="last"),
    ]
    results = (await box.call_all(attempts, VIEW.turn, lambda: VIEW, budget=4)).results
    assert [(r.call_id, r.error) for r in results] == [
        ("call_2_0", "unknown_tool"),
        ("call_2_1", "malformed"),
        ("call_2_2", "invalid_arguments"),
        ("call_2_3", "raised"),
        ("call_2_4", "timeout"),
        ("call_2_5", "limit"),
    ]
    assert results[0].content.startswith("There is no tool `serch`. Did you mean `search`? Tools: `search`, `slow`")
    assert results[1].content == "The JSON ends too early."
    assert results[2].content == (
        "Wrong arguments for `search`: `query` is missing; `limit`: input should be a valid integer, "
        "unable to parse string as an integer; `colour` is not a parameter."
    )
    assert results[3].content == "`fails` failed: 7 is too much"
    assert results[4].content == "`slow` did not answer within 0.3 s."
    assert results[5].content == "You have no tool calls left. Answer without tools."


async def test_tools_may_write_rewards_and_facts(box: Toolbox) -> None:
    (result,) = (await box.call_all([call("peek", word="see")], VIEW.turn, lambda: VIEW, budget=1)).results
    assert (result.content, result.facts) == ("see t", {"peeked": True})
    assert result.rewards == [RewardEvent(value=0.5)]


async def test_json_values_are_shown_as_json(box: Toolbox) -> None:
    (result,) = (await box.call_all([call("numbers")], VIEW.turn, lambda: VIEW, budget=1)).results
    assert result.content == '{"n":[1,2]}'


async def test_what_cannot_be_shown_is_the_tools_fault() -> None:
    def bad() -> object:
        """Give something odd."""
        return object()

    workers = Workers(1)
    box = Toolbox([bind_tool(bad, name=None, seconds=1, effects="pure", where="tools")], workers)
    with pytest.raises(SpecCodeError) as caught:
        await box.call_all([call("bad")], VIEW.turn, lambda: VIEW, budget=1)
    assert (caught.value.blame, caught.value.kind) == ("tool", "tool_bad_result")
    workers.close()
