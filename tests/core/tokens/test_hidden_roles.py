"""Templates that leave messages out on purpose: the spec says so, and every prompt is what `apply_chat_template` writes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from chat_kit import make_tokenizer
from exactness import Player
from exactness_scenarios import Said, Step

from engine.errors import RenderError
from engine.schemas.message import Message
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

_CALLS = (
    "{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\\n</tool_call>' }}{%- endfor %}"
)
_MESSAGE = "{{ '<|im_start|>' + m.role + '\\n' + m.content }}" + _CALLS + "{{ '<|im_end|>\\n' }}"
_TOOLS = "{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}"
_END = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"


def _template(shown: str, before: str = "") -> str:
    """A template that shows the messages `m` for which a condition holds."""
    return f"{_TOOLS}{before}{{%- for m in messages %}}{{%- if {shown} %}}{_MESSAGE}{{%- endif %}}{{%- endfor %}}{_END}"


_NEWEST_USER = (
    "{%- set ns = namespace(user=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.user = loop.index0 %}"
    "{%- endif %}{%- endfor %}"
)
_NO_LATER = (
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{%- endif %}{%- endfor %}"
)
TEMPLATES: dict[str, tuple[str, list[str]]] = {
    "hides results before the newest user": (
        _template("m.role != 'tool' or loop.index0 > ns.user", _NEWEST_USER),
        ["tool"],
    ),
    "hides all results but the newest message": (_template("m.role != 'tool' or loop.last"), ["tool"]),
    "hides later system messages": (_template("m.role != 'system' or loop.first"), ["system"]),
    "refuses later system messages": (_template("true", _NO_LATER), ["system"]),
    "hides old results and refuses later system messages": (
        _template("m.role != 'tool' or loop.index0 > ns.user", _NEWEST_USER + _NO_LATER),
        ["tool", "system"],
    ),
    "shows the newest user alone": (_template("m.role != 'user' or loop.index0 >= ns.user", _NEWEST_USER), ["user"]),
}


def episode(seed: int) -> list[Step]:
    """A random conversation: calls with their results, answers, users, and system messages anywhere."""
    draw = random.Random(seed)
    opening = [Message(role="user", content="Q0: how warm is it?")]
    steps: list[Step] = [[*([Message(role="system", content="Be brief.")] if draw.random() < 0.5 else []), *opening]]
    for turn in range(draw.randint(2, 5)):
        new: list[Message] = []
        if draw.random() < 0.5:
            calls = [{"text": f"City{turn}n{number}"} for number in range(draw.randint(1, 2))]
            steps.append(Said(draw.choice(["", f"I look {turn}."]), calls=calls))
            new += [
                Message(role="tool", content=f"R{turn}n{at}", name="probe_tool", tool_call_id=f"call_{turn}_{at}")
                for at in range(len(calls))
            ]
        else:
            steps.append(Said(f"A{turn}."))
        if draw.random() < 0.3:
            new.append(Message(role="system", content=f"S{turn}: answer in words."))
        if not new or draw.random() < 0.4:
            new.append(Message(role="user", content=f"Q{turn + 1}: and then?"))
        steps.append(new)
    return steps


class _Player(Player):
    """Compares with the template's text for the messages that it is given: without later system messages where it refuses them."""

    def _messages(self, raw: bool = False) -> list[dict[str, Any]]:
        found = super()._messages(raw)
        if not self.template.skips_system:
            return found
        return [view for at, view in enumerate(found) if not at or view["role"] != "system"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small", "")


def with_template(folder: Path, source: str, at: Path, **model: Any) -> ChatTemplate:
    """The tokenizer's chat format with another template."""
    (at / "chat_template.jinja").write_text(source)
    return load_format(ModelSpec(path=str(folder), chat_template=str(at / "chat_template.jinja"), **model), Path())


@pytest.mark.parametrize(
    ("name", "episodes"),
    [*((name, 5) for name in TEMPLATES), *(pytest.param(name, 60, marks=pytest.mark.slow) for name in TEMPLATES)],
)
def test_an_episode_goes_on_exactly_where_its_template_hides_messages(
    name: str, episodes: int, folder: Path, tmp_path: Path
) -> None:
    source, roles = TEMPLATES[name]
    form = with_template(folder, source, tmp_path, hidden_roles=roles)
    without = with_template(folder, source, tmp_path)
    refused = branched = 0
    for seed in range(episodes):
        result = _Player(form, True).play(episode(seed))
        assert result.verdict in ("exact", "spaced", "branched"), (seed, result)
        before = Player(without, True).play(episode(seed))
        assert before.verdict in ("refused", result.verdict)
        if before.verdict == "refused":
            assert any(f"model.hidden_roles: [{role}]" in before.why for role in roles)
            refused += 1
        branched += result.verdict == "branched"
    assert refused > episodes // 10
    assert branched > episodes // 10 or roles == ["system"]


def test_a_message_of_another_role_that_would_be_lost_is_refused(folder: Path, tmp_path: Path) -> None:
    source, _ = TEMPLATES["hides results before the newest user"]
    form = with_template(folder, source, tmp_path, hidden_roles=["system"])
    results = [Player(form, True).play(episode(seed)) for seed in range(12)]
    assert any("messages of role `tool` here: they would be lost" in result.why for result in results)


def test_a_first_system_message_that_the_template_refuses_is_refused(folder: Path, tmp_path: Path) -> None:
    source = _template(
        "true", "{%- if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{%- endif %}"
    )
    form = with_template(folder, source, tmp_path, hidden_roles=["system"])
    with pytest.raises(RenderError, match="No system role"):
        form.render([Message(role="system", content="Be brief."), Message(role="user", content="Q")])
