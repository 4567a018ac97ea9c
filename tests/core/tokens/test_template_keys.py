"""What is read from a template's source: literals, changes of contents, dates, and what makes it be rendered each time."""

from __future__ import annotations

import pytest
from chat_kit import TEMPLATES
from exactness import cases

from engine.tokens.bridge.keys import TemplateKeys, looks, read_template

USERS = "{% set ns = namespace(last=-1, n=0, a=false, b=false) %}"


def read(source: str, **variables: object) -> TemplateKeys:
    return read_template([source], variables)


def each(body: str) -> str:
    return f"{USERS}{{% for m in messages %}}{body}{{% endfor %}}"


@pytest.mark.parametrize(
    ("body", "literals"),
    [
        ("{{ m.content if '/think' in m.content else '' }}", ["/think"]),
        ("{% if m['content'].endswith('/nothink') %}.{% endif %}", ["/nothink"]),
        ("{% if m.content.strip().startswith('a!') or 'b!' not in m.content %}.{% endif %}", ["a!", "b!"]),
        ("{% set c = m.content %}{{ c.split('</x>')[-1].lstrip('\\n') }}", ["</x>"]),
        ("{{ m.content.replace('/a', '').replace('/b', '') }}", ["/a", "/b"]),
        ("{% set mark = '##' %}{% if mark in m.content %}.{% endif %}", ["##"]),
        ("{% if bos_token in m.content %}.{% endif %}", ["<s>"]),
        ("{% if m.content.find('##') >= 0 %}.{% endif %}", ["##"]),
        ("{% if messages[-1].content is string and 'now!' in messages[-1].content %}.{% endif %}", ["now!"]),
        ("{% if '/off' in m.content %}{% set ns.a = true %}{% elif '/on' in m.content %}{% set ns.a = false %}{% endif %}{{ ns.a }}", ["/off", "/on"]),
        ("{% macro text(c) %}{% if c is string %}{{ c }}{% endif %}{% endmacro %}{{ '.' if text(m.content).endswith('/x') else '' }}", ["/x"]),
        ("{% for call in m.tool_calls %}{% if call.function.name == 'py!' %}.{% endif %}{% endfor %}", []),
    ],
)  # fmt: skip
def test_literals_that_are_looked_for_are_found(body: str, literals: list[str]) -> None:
    keys = read(each(body), bos_token="<s>")
    assert list(keys.literals) == literals
    assert keys.whole_because == ()
    assert not keys.changes


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content }}",
        "{{ m.content | trim }}{{ m.role | upper }}",
        "{% if m.content %}{{ m.content }}{% endif %}",
        "{% if m.content | length > 0 %}.{% endif %}",
        "{% if loop.first or loop.previtem.role != m.role %}.{% endif %}{% if loop.index0 == 0 %}.{% endif %}",
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}.{% endif %}",
        "{% if loop.index0 == messages | length - 1 %}.{% endif %}",
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turn') }}{% endif %}",
        "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{{ '' if loop.index0 > ns.last else '.' }}",
        "{% if m.role == 'tool' and not ns.a %}{% set ns.a = true %}first{% endif %}",
        "{% if m.tool_calls and m.tool_calls | length > 1 %}.{% endif %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}",
        "{% if enable_thinking is defined and messages | length > 4 %}{{ m.content[:4] }}{% endif %}",
        "{% for p in m.content %}{% if p.type == 'image' %}<i>{% else %}{{ p.text }}{% endif %}{% endfor %}",
    ],
)  # fmt: skip
def test_a_template_that_copies_keeps_its_bridges(body: str) -> None:
    keys = read_template([each(body)], {}, in_parts="p.type" in body)
    assert (keys.literals, keys.equals, keys.changes, keys.whole_because) == ((), (), False, ())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{% if m.content | length > 20 %}.{% endif %}", "compares a length"),
        ("{% if m.content[0] == '#' %}.{% endif %}", "changed text"),
        ("{% if m.content.split() | length > 2 %}.{% endif %}", "calls `split`"),
        ("{% if m.content.isdigit() %}.{% endif %}", "calls `isdigit`"),
        ("{% if m.content | upper == m.content %}.{% endif %}", "changed text"),
        ("{% if m.content in other %}.{% endif %}", "not written in it"),
        ("{% if loop.index % 5 == 0 %}.{% endif %}", "number of a message"),
        ("{% if loop.index0 == 3 %}.{% endif %}", "number of a message"),
        ("{% if loop.revindex < 3 %}.{% endif %}", "`loop.revindex`"),
        ("{% if messages | length > 6 %}.{% endif %}", "number of a message"),
        ("{{ loop.index }}", "writes a number"),
        ("{{ messages[2].role }}", "by its number"),
        ("{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}{{ '.' if ns.n > 2 else '' }}", "a state"),
        ("{% if m.role == 'user' %}{% if ns.a %}{% set ns.b = true %}{% endif %}{% set ns.a = true %}{% endif %}{{ '.' if ns.b else '' }}", "a state"),
        ("{% if m.role == 'user' %}{% set ns.a = not ns.a %}{% endif %}{{ '.' if ns.a else '' }}", "a state"),
        ("{% for o in messages %}{{ '.' if o.role == m.role else '' }}{% endfor %}", "again for each message"),
        ("{{ strftime_now('%H:%M') }}", "shows the time"),
        ("{{ [1, 2] | random }}{{ m.content | random }}", "filter `random`"),
        ("{% if 'x' in m.content %}.{% endif %}", "probes of the checks have"),
        ("{% set c = '<t>' + m.content %}{% if c.startswith('<t>#') %}.{% endif %}", "put together"),
        ("{% filter upper %}{{ m.content }}{% endfilter %}", "which is not read"),
        ("{{ m.content[:50] if loop.last else m.content }}", "depending on later messages"),
        (
            "{% if m.role == 'tool' %}{% set ns.a = true %}{% endif %}{% if m.role == 'user' and ns.a %}{% set ns.last = loop.index0 %}{% endif %}"
            "{{ m.content if loop.index0 > ns.last else '' }}",
            "number of a message",
        ),
        ("{{ m.items() }}", "all keys of a message"),
        ("{% if m.role == 'tool' %}{% set seen = 'yes' %}{% endif %}{% if not seen %}{{ loop.index }}{% endif %}", "writes a number"),
        ("{% if m.role == 'user' %}{% set ns.n = ns.n ~ 'x' %}{% endif %}{{ ns.n }}", "writes a number"),
        ("{{ messages | map(attribute='content') | join }}", "filter `map` on the messages"),
    ],
)  # fmt: skip
def test_what_kinds_cannot_tell_makes_a_template_be_rendered(body: str, why: str) -> None:
    keys = read(each(body))
    assert any(why in reason for reason in keys.whole_because), keys.whole_because


def test_changes_that_probes_do_not_show_are_told() -> None:
    assert read(each("{{ m.content[:2000] }}")).changes
    assert read(each("{{ m.content | truncate(50) }}")).changes
    assert read(each("{{ m.content.strip('#') }}")).changes
    assert not read(each("{{ m.content | tojson }}{{ m.content.strip(' \\n') }}")).changes


def test_dates_and_times() -> None:
    assert read("{{ strftime_now('%d %b %Y') }}" + each("{{ m.content }}")) == TemplateKeys(dated=True)
    assert read("{{ strftime_now('%c') }}").timed
    assert read(each("{{ strftime_now(m.role) }}")).timed


def test_tests_of_tools_are_told() -> None:
    assert read("{% if tools | length > 2 %}.{% endif %}").tests_tools
    assert not read("{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}").tests_tools


WHOLE = {"gptoss", "lfm2_2_5"}
LITERALS = {
    "qwen3": ("<tool_response>", "</tool_response>", "</think>", "<think>"),
    "glm4moe": ("/nothink", "</think>", "<think>"),
}


@pytest.mark.parametrize("name", sorted(cases()))
def test_what_real_templates_do(name: str) -> None:
    keys = read((cases()[name] / "chat_template.jinja").read_text())
    assert bool(keys.whole_because) == (name in WHOLE), keys.whole_because
    if name in LITERALS:
        assert keys.literals == LITERALS[name]
    if name in ("gemma3", "llama3_2", "qwen3_instruct_2507"):
        assert not keys.reads


def test_what_templates_of_the_tests_do() -> None:
    found = {name: read(source) for name, source in TEMPLATES.items()}
    assert {name for name, keys in found.items() if keys.whole_because} == {"counting"}
    assert {name for name, keys in found.items() if keys.literals} == {"thinking"}


def test_what_a_content_is_compared_with_is_sought_in_texts_put_together() -> None:
    source = "{% for m in messages %}{% if m.content == ' ok' %}yes{% else %}{{ m.content }}{% endif %}{% endfor %}"
    _, inspected, sought = looks(read_template([source], {}), source)
    assert inspected is not None
    assert sought is not None
    assert inspected.search("ok\n")
    assert not inspected.search("why\0ok\0{}")
    assert sought.search("why\0ok\0{}")
    assert not sought.search("why\0no\0{}")
