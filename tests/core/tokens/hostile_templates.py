"""Chat templates that test, cut and count what messages say, and random episodes whose messages are about what they test.

`HOSTILE` are written by hand, `random_template` draws others from a grammar. `episode` gives the steps of a script for
`exactness.Player`, which compares each prompt with what `apply_chat_template` of transformers writes.
"""

from __future__ import annotations

from random import Random

from exactness_scenarios import Said, Step

from engine.schemas.message import Message

ROUND = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
ASK = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def _each(content: str, before: str = "") -> str:
    """A template that writes `content` for each message."""
    return f"{before}{{%- for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' }}}}{content}{{{{ '<|im_end|>\\n' }}}}{{% endfor %}}{ASK}"


HOSTILE = {
    "reminds at each fifth user and cuts what tools say": _each(
        "{%- if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% if ns.n % 5 == 0 %}{{ '[Remember: be brief.] ' }}{% endif %}{% endif %}"
        "{%- if m.role == 'tool' and m.content | length > 2000 %}{{ m.content[:2000] + ' [cut]' }}{% else %}{{ m.content }}{% endif %}",
        "{%- set ns = namespace(n=0) %}",
    ),
    "first line depends on words of a later user": (
        "{%- set ns = namespace(hurry=false) %}{% for m in messages %}{% if m.role == 'user' and 'hurry' in m.content %}{% set ns.hurry = true %}{% endif %}{% endfor %}"
        "{{- '<|im_start|>system\\n' + ('Be quick.' if ns.hurry else 'Take your time.') + '<|im_end|>\\n' }}" + ROUND + ASK
    ),
    "marks digits, capitals and the number of words": _each(
        "{%- if m.role != 'assistant' %}{% set w = namespace(digit=false) %}{% for c in m.content %}{% if c in '0123456789' %}{% set w.digit = true %}{% endif %}"
        "{% endfor %}{% if w.digit %}{{ '[digits] ' }}{% endif %}{% if m.content | upper == m.content %}{{ '[loud] ' }}{% endif %}"
        "{%- if m.content.split() | length > 3 %}{{ '[long] ' }}{% endif %}{% endif %}{{ m.content }}"
    ),
    "marks old messages with digits once a user has spoken again": _each(
        "{%- set w = namespace(digit=false) %}{% for d in ['1', '7', '42'] %}{% if d in m.content %}{% set w.digit = true %}{% endif %}{% endfor %}"
        "{{- '[old number] ' if w.digit and m.role != 'assistant' and loop.index0 < ns.last else '' }}{{ m.content }}",
        "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}",
    ),
    "the newest of /think and /no_think in any message": (
        "{%- set ns = namespace(think=true) %}{% for m in messages %}{% if m.role != 'assistant' %}{% if '/no_think' in m.content %}{% set ns.think = false %}"
        "{% elif '/think' in m.content %}{% set ns.think = true %}{% endif %}{% endif %}{% endfor %}"
        "{{- '<|im_start|>system\\n' + ('Think.' if ns.think else 'Do not think.') + '<|im_end|>\\n' }}"
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.replace('/no_think', '').replace('/think', '').strip() + '<|im_end|>\\n' }}{% endfor %}" + ASK
    ),
    "shows the end of old messages and the beginning of new ones": _each(
        "{{- m.content[-40:] if loop.revindex > 3 else m.content[:60] }}"
    ),
    "lengths": _each(
        "{{- m.content }}{% if m.content | length is divisibleby 7 %}{{ ' .' }}{% endif %}",
        "{{- '<|im_start|>system\\n' + (messages | map(attribute='content') | join | length | string) + '<|im_end|>\\n' }}",
    ),
    "the hour": "{{- '<|im_start|>system\\nIt is ' + strftime_now('%Y-%m-%d %Hh') + '<|im_end|>\\n' }}" + ROUND + ASK,
    "loop arithmetic": _each(
        "{{- loop.index | string + '/' if loop.index0 % 3 == 2 else '' }}{{ m.content }}{% if loop.index0 == 6 %}{{ ' Halfway.' }}{% endif %}"
    ),
    "depends on the last message": (
        "{{- '<|im_start|>system\\n' + messages[-1].role + (' asks' if messages[-1].content.endswith('?') else ' says') + '<|im_end|>\\n' }}" + ROUND + ASK
    ),
    "reads thoughts in any message": _each(
        "{%- set parts = m.content.split('</think>') %}{% if parts | length > 1 and m.role == 'assistant' %}"
        "{{- ('<think>' + parts[0].replace('<think>', '') + '</think>' if loop.index0 > ns.last else '') + parts[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}",
        "{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}",
    ),
    "asks for an answer in one mode": (
        ROUND + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if 'answer' in messages[-1].content %}{{ 'Answer: ' }}{% endif %}{% endif %}"
    ),
    "remembers what was said by a state": _each(
        "{%- if m.role == 'tool' %}{% set ns.s = 'tool' %}{% elif ns.s == 'tool' and m.role == 'user' %}{% set ns.s = 'asked' %}{% elif ns.s == 'asked' and m.role == 'user' %}"
        "{%- set ns.s = 'again' %}{% endif %}{{ m.content }}{% if ns.s == 'again' %}{{ ' (again)' }}{% endif %}",
        "{%- set ns = namespace(s='') %}",
    ),
    "counts by true and false": _each(
        "{%- if m.role == 'user' %}{% if ns.b %}{% set ns.c = true %}{% endif %}{% if ns.a %}{% set ns.b = true %}{% endif %}{% set ns.a = true %}{% endif %}"
        "{{- m.content }}{% if ns.c %}{{ ' (third)' }}{% endif %}",
        "{%- set ns = namespace(a=false, b=false, c=false) %}",
    ),
}  # fmt: skip
"""Templates by what they do. Each is a way in which bridges that are checked on probes would be wrong."""

WORDS = [
    "What is it?", " ", "\n", "Go on.", "hurry", "Please hurry!", "/think", "/no_think", "/nothink", "7", "42", "STOP", "NO", "a b c d", "answer",
    "The answer is", "x" * 45, "long " * 14, "Why?", "</think>", "<think>", "<b>", "é🙂", "Answer: 4", "1. one\n2. two", "ok",
]  # fmt: skip
REPLIES = [
    "It is 42.", "Yes", "", "NO", "<think>\nHm.\n</think>\n\nIt is 4.", "Hm.\n</think>\n\nNo", "Answer: 4", "answer 7", "hurry", "/no_think", " Yes.\n",
    "long " * 14, "Is it?", "<think>\n\n</think>\n\nOk.",
]  # fmt: skip


def _text(random: Random) -> str:
    size = random.choice((1, 1, 1, 2, 3))
    text = random.choice(("", " ")).join(random.choices(WORDS, k=size))
    return text if random.random() > 0.04 else text + " and so on" * random.choice((199, 200, 230))


def episode(random: Random, turns: int = 6) -> list[Step]:
    """The steps of a random episode."""
    opening = [Message(role="system", content=_text(random))] if random.random() < 0.3 else []
    steps: list[Step] = [[*opening, Message(role="user", content=_text(random))]]
    for _ in range(random.randint(1, turns)):
        steps.append(Said(raw=random.choice(REPLIES), end=random.choice(("close", "close", "close", "none"))))
        role = random.choice(("user", "user", "tool"))
        steps.append([Message(role=role, content=_text(random)) for _ in range(random.choice((1, 1, 1, 2)))])
    return steps


# --- templates of a grammar ----------------------------------------------------------------------------------------

_LITERALS = ("hurry", "/no_think", "7", "?", "Answer: ", "</think>", "STOP", "a b", "\\n", "é", "ok", "x")


def _fact(random: Random, of: str) -> str:
    """A condition on a message."""
    text = random.choice(_LITERALS)
    size = random.choice((0, 1, 3, 20, 45, 2000))
    return random.choice((
        f"{of}.role == '{random.choice(('user', 'tool', 'assistant', 'system'))}'",
        f"'{text}' in {of}.content",
        f"{of}.content.startswith('{text}')",
        f"{of}.content.strip().endswith('{text}')",
        f"{of}.content | length > {size}",
        f"{of}.content | upper == {of}.content",
        f"{of}.content == 'ok'",
        f"{of}.content.split() | length > {random.choice((1, 3))}",
        f"{of}.content[:1] in 'AWI<'",
        f"{of}.content | trim",
    ))  # fmt: skip


def _where(random: Random) -> str:
    """A condition on the place of the message `m`."""
    number = random.randint(0, 5)
    return random.choice((
        "loop.first", "loop.last", "not loop.last", f"loop.index0 == {number}", f"loop.index % {random.choice((2, 3, 5))} == 0", "loop.index0 > ns.last",
        "loop.index0 < ns.last", f"loop.revindex0 < {number}", f"messages | length > {number}", "loop.index0 == messages | length - 1",
        "messages[-1].role == 'tool'", f"'{random.choice(_LITERALS)}' in messages[-1].content", "ns.flag", f"ns.count > {number}",
        f"ns.count % {random.choice((2, 3))} == 1", "messages[0].role == 'system'", f"'{random.choice(_LITERALS)}' in messages[0].content",
        "loop.previtem and loop.previtem.role == m.role", "loop.nextitem and loop.nextitem.role == 'user'", "ns.kept", "true",
    ))  # fmt: skip


def _content(random: Random) -> str:
    size = random.choice((5, 40, 2000))
    return random.choice((
        "m.content", "m.content", "m.content | trim", "m.content.strip()", f"m.content[:{size}]", f"m.content[-{size}:]", "m.content | upper",
        f"m.content.replace('{random.choice(_LITERALS)}', '')", "m.content.split('</think>')[-1]", f"m.content.split('{random.choice(_LITERALS)}')[0]",
        f"m.content | truncate({size})", "(m.content | replace('ok', 'OK'))", "m.content.lstrip('<>Ia')", "m.content | capitalize",
        "ns.count ~ m.content", "m.content ~ ns.kept", "(ns.flag | string) + m.content", "m.content.split('</think>')[-1].strip()",
    ))  # fmt: skip


def _change(random: Random) -> str:
    return random.choice(
        (
            "ns.flag = true",
            "ns.flag = not ns.flag",
            "ns.count = ns.count + 1",
            "ns.kept = m.content",
            "ns.flag = ns.flag or true",
            "ns.kept = ns.flag",
            "ns.last = loop.index0",
        )
    )


def random_template(random: Random) -> str:
    """A template that writes ChatML, with conditions, cuts, counts and states of the grammar."""
    both = lambda: random.choice(  # noqa: E731
        (
            _fact(random, "m"),
            _where(random),
            f"{_where(random)} and {_fact(random, 'm')}",
            f"not ({_fact(random, 'm')})",
        )
    )
    first = (
        f"{{% for m in messages %}}{{% if {random.choice((_fact(random, 'm'), both()))} %}}{{% set {_change(random)} %}}{{% endif %}}{{% endfor %}}"
        if random.random() < 0.4
        else ""
    )
    header = (
        f"{{{{ '<|im_start|>system\\n' }}}}{{% if {random.choice(('ns.flag', 'ns.count > 2', 'ns.kept', _fact(random, 'messages[-1]'), _fact(random, 'messages[0]')))} %}}"
        "{{ 'One way.' }}{% else %}{{ 'Other way.' }}{% endif %}{{ '<|im_end|>\\n' }}"
        if random.random() < 0.4
        else ""
    )
    marks = "".join(
        f"{{% if {both()} %}}{{{{ '[{number}]' }}}}{{% endif %}}" for number in range(random.choice((0, 1, 1, 2)))
    )
    state = f"{{% if {both()} %}}{{% set {_change(random)} %}}{{% endif %}}" if random.random() < 0.4 else ""
    shown = _content(random) if random.random() < 0.6 else f"({_content(random)} if {both()} else {_content(random)})"
    ask = random.choice(
        (
            "",
            "",
            f"{{% if {random.choice((_fact(random, 'messages[-1]'), 'ns.flag', 'ns.count > 2'))} %}}{{{{ 'Answer: ' }}}}{{% endif %}}",
        )
    )
    return (
        "{%- set ns = namespace(flag=false, count=0, kept='', last=-1) %}"
        f"{first}{header}"
        f"{{%- for m in messages %}}{state}{{{{ '<|im_start|>' + m.role + '\\n' }}}}{marks}{{{{ {shown} }}}}{{{{ '<|im_end|>\\n' }}}}{{% endfor %}}"
        f"{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{ask}{{% endif %}}"
    )
