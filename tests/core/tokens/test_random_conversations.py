"""Conversations of several threads, in any order of steps: prompts, rows and messages are those of twins that got there directly."""

from __future__ import annotations

from typing import Any

import pytest
from conversation_kit import TOOLS, Formats, user
from examples import examples
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_conversations import CALL, Play, Refused, Step, plans
from slow_cases import slow_but
from test_any_conversation import REPLIES, TEXTS

from engine.schemas.message import Message
from engine.tokens.template import ChatTemplate

IDS = st.lists(st.integers(0, 1 << 20), max_size=8)
CASES: dict[str, tuple[dict[str, Any], Any, tuple[str, ...]]] = {
    "family": ({"template": "thinking"}, "branch", ("user", "tool")),
    "family keeps": ({"template": "thinking"}, "keep", ("user", "tool")),
    "thinking": ({"template": "thinking", "renderer": "template"}, "branch", ("user", "tool", "system")),
    "plain": ({"template": "plain"}, "branch", ("user", "tool", "system")),
    "plain keeps": ({"template": "plain"}, "keep", ("user", "tool")),
    "alternating": ({"template": "alternating", "tool_role": "user"}, "branch", ("user", "tool")),
    "unmarked": ({"template": "unmarked"}, "branch", ("user", "tool")),
    "counting": ({"template": "counting"}, "branch", ("user", "tool")),
    "prefilled": ({"template": "prefilled"}, "branch", ("user", "tool")),
    "prefilled keeps": ({"template": "prefilled"}, "keep", ("user", "tool")),
    "qwen2_5": ({"shipped": "qwen2_5"}, "branch", ("user", "tool")),
    "qwen3": ({"shipped": "qwen3"}, "branch", ("user", "tool")),
    "qwen3 keeps": ({"shipped": "qwen3"}, "keep", ("user", "tool")),
}
EXACT: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "thinking": ({"template": "thinking"}, TOOLS),
    "plain": ({"template": "plain"}, []),
    "counting": ({"template": "counting"}, []),
    "qwen2_5": ({"shipped": "qwen2_5"}, TOOLS),
    "qwen3": ({"shipped": "qwen3"}, TOOLS),
}
BY_DEFAULT = ("family", "plain keeps", "counting", "qwen3")
ANY = settings(  # a plan is long: to make it smaller takes minutes
    max_examples=examples(40),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def find(formats: Formats, shipped: Formats) -> Formats:
    """`find(**told)`: a chat format of `formats`, or with `shipped` one of a real tokenizer."""

    def get(**told: Any) -> ChatTemplate:
        name = told.pop("shipped", None)
        return formats(**told) if name is None else shipped(name, **told)

    return get


@pytest.mark.parametrize("case", slow_but(CASES, *BY_DEFAULT))
@given(data=st.data())
@ANY
def test_threads_in_any_order_are_those_of_twins_that_got_there_directly(
    case: str, find: Formats, data: st.DataObject
) -> None:
    """Ids, log-probs, versions and messages, whatever was taken back, shown instead, or gone on with after an earlier reply."""
    told, history, roles = CASES[case]
    steps = data.draw(plans(roles, TEXTS, IDS | st.sampled_from(REPLIES), exact=False))
    Play(find(**told), history, TOOLS, [user(data.draw(TEXTS))]).play(steps)


class Written(Play):
    """Compares each prompt with what the package transformers makes of the template."""

    def _do(self, method: str, *arguments: Any) -> Any:
        found = super()._do(method, *arguments)
        if method == "ask" and not isinstance(found, Refused):
            text = self._text()
            assert self.template.decode(found) == text
            if not self.main.after:  # no reply is in it
                assert found == self.template.tokenizer.encode(text, add_special_tokens=False)
        return found

    def _text(self) -> str:
        views = [_view(message) for message in self.main.shown]
        return str(
            self.template.tokenizer.apply_chat_template(
                views, tools=self.past.now or None, add_generation_prompt=True, tokenize=False
            )
        )


def _view(message: Message) -> dict[str, Any]:
    view: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        view["reasoning_content"] = message.reasoning
    if message.tool_calls:
        view["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return view


@pytest.mark.parametrize("case", slow_but(EXACT, "thinking", "qwen3"))
@given(data=st.data())
@ANY
def test_prompts_of_threads_are_what_the_template_writes(case: str, find: Formats, data: st.DataObject) -> None:
    """Of replies that are written as the template writes them, each prompt is the template's text of the messages shown."""
    told, tools = EXACT[case]
    replies = ["It is 42.", "Yes.\nNo.", "<think>\nHm.\n</think>\n\n42"] if tools else ["It is 42.", "Yes.\nNo."]
    replies += [CALL, f"Let me see.\n{CALL}\n{CALL}"] if tools else []
    words = st.sampled_from(["What is 17 plus 25?", "Try again.", "é你好🙂\n\nSo?"])
    roles = ("user", "tool") if tools else ("user",)
    steps: list[Step] = data.draw(plans(roles, words, st.sampled_from(replies), exact=True))
    Written(find(**told), "branch", tools, [user(data.draw(words))]).play(steps)
