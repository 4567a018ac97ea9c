"""Templates write what they write in transformers, character for character."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from chat_kit import TEMPLATES
from jinja2.exceptions import SecurityError, TemplateError
from slow_cases import slow_but

from engine.tokens.jinja import compile_template

_TRL = importlib.util.find_spec("trl")
REAL = (
    sorted((Path(_TRL.submodule_search_locations[0]) / "chat_templates").glob("*.jinja"))
    if _TRL and _TRL.submodule_search_locations
    else []
)

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather in °C, <now>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "id": "call_0_0", "function": {"name": "weather", "arguments": {"city": "Köln <&>"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hé <b> \n"}],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "Ask.", "tool_calls": [CALL]},
        {"role": "tool", "content": "12", "name": "weather", "tool_call_id": "call_0_0"},
        {"role": "assistant", "content": "It is 12 °C."},
        {"role": "user", "content": "Thanks"},
    ],
]

FEATURES = {
    "white space": "  {% if true %}\n    a\n  {% endif %}\n{{- ' b' }} \n {%- for m in messages %}\n {{ m.content }}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% continue %}x{% endfor %}y",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(sort_keys=true, ensure_ascii=true) }}",
    "generation": "a{% generation %}\n{{ messages[0].content }}\n{% endgeneration %}\nb",
    "namespace": "{% set ns = namespace(n=0, self=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "dict": "{{ dict(a=1, b='x') }}{{ dict.fromkeys(['k'], 2) }}{{ dict([('c', 3)]) }}",
    "private name": "{% set ns = namespace(_a=1) %}",
    "private attribute": "{% set ns = namespace(a=1) %}{% set ns._b = 2 %}",
    "no way out": "{{ messages.__class__.__mro__ }}{{ ''.__class__ }}",
    "no change": "{{ messages.append(1) }}",
    "names of dicts": "{{ dict(items=1).items() | list }}{{ dict(items=1)['items'] }}{{ dict(get=1).get('get') }}{{ dict(a=none).a }}",
    "formats": "{{ '{}-{x}'.format(1, x=2) }}{{ '{a}'.format_map(dict(a=3)) }}{% set ns = namespace(f='{}'.format) %}{{ ns.f(4) }}",
    "hidden from formats": "{{ '{0.__class__}'.format(messages) }}",
    "loops": "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.length }}{{ loop.depth }}"
    "{{ loop.previtem is defined }}{{ (loop.nextitem | default({'role': 'end'})).role }}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{% endfor %}",
    "private of loops": "{% for m in messages %}{{ loop._iterable }}{% endfor %}",
    "private of namespaces": "{% set ns = namespace(a=1) %}{{ ns.__class__ }}",
    "calls": "{{ ''.join(messages | map(attribute='role')) }}{% for m in messages %}{{ m.role.replace('u', 'ü', 1).center(9, '-') }}{% endfor %}",
    "wrong call": "{{ messages[0].role.split(1) }}",
    "raise": "{{ raise_exception('no ' + messages[0].role) }}",
    "undefined": "{{ nothing }}|{{ messages[0].nothing }}|{{ nothing.more }}",
    "year": "{{ strftime_now('%Y') }}",
    "strings": "{{ messages[0].content.strip().upper() | trim | length }}{{ 'a,b'.split(',') | join('-') }}",
}


def written(compile_: Any, source: str, chat: Any, tools: Any) -> tuple[str, str]:
    try:
        return "wrote", compile_(source).render(
            messages=chat, tools=tools, documents=None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        )
    except Exception as error:  # noqa: BLE001  (whatever the one raises, the other must)
        return type(error).__name__, "" if isinstance(error, SecurityError) else str(error)


def assert_same(source: str) -> list[str]:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    how = []
    for chat in CHATS:
        for tools in (None, [TOOL]):
            wanted = written(_compile_jinja_template, source, chat, tools)
            assert written(compile_template, source, chat, tools) == wanted
            how.append(wanted[0])
    return how


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_kinds_of_templates_write_the_same(name: str) -> None:
    assert "wrote" in assert_same(TEMPLATES[name])


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_is_the_same(name: str) -> None:
    refusals = {"private name", "private attribute", "no way out", "no change", "raise", "undefined", "wrong call"}
    assert ("wrote" in assert_same(FEATURES[name])) is (name not in refusals)


@pytest.mark.skipif(not REAL, reason="trl, whose templates are real ones, is not installed")
@pytest.mark.parametrize("path", slow_but(REAL, *REAL[::8]), ids=lambda path: path.stem)
def test_real_templates_write_the_same(path: Path) -> None:
    assert_same(path.read_text(encoding="utf-8"))


def test_what_a_template_refuses_it_says() -> None:
    with pytest.raises(TemplateError, match="no user"):
        compile_template(FEATURES["raise"]).render(messages=CHATS[0])


def test_a_template_is_compiled_once() -> None:
    assert compile_template("{{ messages }}") is compile_template("{{ messages }}")
