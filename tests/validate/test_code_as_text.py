"""Code that is read as text: what it leaves open is no mistake, and what it excludes is one, through bases, re-exports and aliases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from slow_cases import slow_but_each

from engine.spec.access import Access
from engine.spec.load import load_spec
from engine.validate.check import check_rules

pytestmark = pytest.mark.usefixtures("in_folder")

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
"""
IMPORTS = """\
from __future__ import annotations
import abc, dataclasses, enum, functools, typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, NoReturn, Optional, Protocol, Self, TypeVar, Union
from pydantic import BaseModel
from engine.schemas.environment import EpisodeView, Reset, Step, Task, ToolReply, User, UserTurn, action
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
T = TypeVar("T")
raise SystemExit("this module was imported")
"""
RESPOND = "    def respond(self, view: EpisodeView) -> UserTurn: ...\n"
INIT = "    def __init__(self, hints: int = 1) -> None: ...\n"
HINTS = 'user: {use: "parts:X", with: {hints: 2}}\nmachine: retry_with_feedback\n'
USER = 'user: {use: "parts:X"}\nmachine: retry_with_feedback\n'
WRONG = 'user: {use: "parts:X", with: {hints: two, more: 1}}\nmachine: retry_with_feedback\n'
TOOL = 'tools: [{use: "parts:x"}]\nmachine: tools\n'


def found(spec: str, code: str, files: dict[str, str] | None = None) -> list[str]:
    """The findings that are no notes, without importing the code."""
    for name, text in {"parts.py": IMPORTS + code, **(files or {})}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    given = {line.partition(":")[0] for line in spec.splitlines() if not line.startswith(" ")}
    head = "\n".join(line for line in HEAD.splitlines() if line.partition(":")[0] not in given)
    Path("s.yaml").write_text(f"{head}\n{spec}")
    problems, _ = check_rules(load_spec("s.yaml", access=Access.for_spec(Path("s.yaml"))))
    assert "parts" not in sys.modules
    return [f"{item.rule}: {item.message}" for item in problems if item.severity != "info"]


OPEN: dict[str, tuple[str, str]] = {
    "a base that cannot be read": (WRONG, "from nowhere_at_all import Base\nclass X(Base): ..."),
    "a base of a third party": (WRONG, "import numpy\nclass X(numpy.ndarray): ..."),
    "a base that is computed": (WRONG, "class X(make()): ..."),
    "a base of a base that cannot be read": (
        WRONG,
        "from nowhere_at_all import Base\nclass A(Base): ...\nclass X(A): ...",
    ),
    "keyword arguments": (WRONG, "class X:\n    def __init__(self, **options): ...\n" + RESPOND),
    "a decorated class": (WRONG, "@register\nclass X: ..."),
    "a decorated constructor": (WRONG, "class X:\n    @wraps\n    def __init__(self): ...\n" + RESPOND),
    "a decorated function": (WRONG, "@register\ndef X(): ..."),
    "a decorated method": (USER, "class X:\n    @cached\n    def respond(self): ..."),
    "a dataclass": (
        HINTS,
        "@dataclass\nclass X:\n    hints: int\n    more: list[int] = field(default_factory=list)\n" + RESPOND,
    ),
    "a dataclass with keywords": (HINTS, "@dataclasses.dataclass(kw_only=True)\nclass X:\n    hints: int\n" + RESPOND),
    "a class from a dataclass": (HINTS, "@dataclass\nclass A:\n    hints: int\nclass X(A):\n" + RESPOND),
    "a NamedTuple": (HINTS, "class X(NamedTuple):\n    hints: int\n" + RESPOND),
    "a Pydantic model": (HINTS, "class X(BaseModel):\n    hints: int\n" + RESPOND),
    "a partial class": (WRONG, "class A: ...\nX = functools.partial(A, hints=1)"),
    "a class that is called": (WRONG, "X = make_class()"),
    "__getattr__": (USER, "class X:\n    def __getattr__(self, name): ..."),
    "__getattribute__": (USER, "class X:\n    def __getattribute__(self, name): ..."),
    "__new__": (WRONG, "class X:\n    def __new__(cls, *given, **named): ...\n" + RESPOND),
    "a metaclass": (WRONG, "class X(metaclass=Meta): ..."),
    "a class keyword": (WRONG, "class X(A, table=True): ...\nclass A:\n    def __init_subclass__(cls, table): ..."),
    "a method set on the object": (USER, "class X:\n    def __init__(self):\n        self.respond = lambda view: None"),
    "a method set on the class": (USER, "class X: ...\nX.respond = lambda self, view: None"),
    "a method set by setattr": (USER, "class X: ...\nsetattr(X, 'respond', None)"),
    "a method that is assigned": (USER, "class X:\n    def say(self, view): ...\n    respond = say"),
    "a method in a branch": (USER, "class X:\n    if True:\n        def respond(self, view): ..."),
    "a class in a branch": (WRONG, "if True:\n    class X: ...\nelse:\n    class X: ..."),
    "a class that is bound twice": (WRONG, "class X: ...\nX = decorate(X)"),
    "a class that a function rebinds": (WRONG, "class X: ...\ndef f():\n    global X\n    X = None"),
    "Any": (WRONG, "class X:\n    def __init__(self, hints: Any, more: object): ...\n" + RESPOND),
    "no annotation": (WRONG, "class X:\n    def __init__(self, hints, more): ...\n" + RESPOND),
    "a type variable": (
        WRONG,
        "class X(Generic[T]):\n    def __init__(self, hints: T, more: Sequence[T]): ...\n".replace("Sequence[T]", "T")
        + RESPOND,
    ),
    "a type parameter that hides a builtin": (
        WRONG,
        "class X:\n    def __init__[int](self, hints: int, more): ...\n" + RESPOND,
    )
    if sys.version_info >= (3, 12)
    else (WRONG, "class X:\n    def __init__(self, hints: T, more): ...\n" + RESPOND),
    "a name of the class that hides a builtin": (
        WRONG,
        "class X:\n    int = str\n    def __init__(self, hints: int, more): ...\n" + RESPOND,
    ),
    "a name of the module that hides a builtin": (
        WRONG,
        "int = str\nclass X:\n    def __init__(self, hints: int, more): ...\n" + RESPOND,
    ),
    "a forward reference": (
        WRONG,
        "class X:\n    def __init__(self, hints: 'Hints', more: 'int'): ...\nHints = str\n"
        + RESPOND.replace("    def", "\nclass Y:\n    def")
        + "X.respond = Y.respond",
    ),
    "a class of its own": (
        WRONG,
        "class Hints(str): ...\nclass X:\n    def __init__(self, hints: Hints, more: int): ...\n" + RESPOND,
    ),
    "an enum": (
        WRONG,
        "class Hints(enum.Enum):\n    two = 'two'\nclass X:\n    def __init__(self, hints: Hints, more: int): ...\n"
        + RESPOND,
    ),
    "a NewType": (
        WRONG,
        "Hints = typing.NewType('Hints', int)\nclass X:\n    def __init__(self, hints: Hints, more: int): ...\n"
        + RESPOND,
    ),
    "a path": (WRONG, "class X:\n    def __init__(self, hints: Path, more: float): ...\n" + RESPOND),
    "a union": (WRONG, "class X:\n    def __init__(self, hints: int | str, more: Optional[float]): ...\n" + RESPOND),
    "an alias": (
        WRONG,
        "Hints = Union[int, str]\nclass X:\n    def __init__(self, hints: Hints, more: int): ...\n" + RESPOND,
    ),
    "a literal": (
        WRONG,
        "class X:\n    def __init__(self, hints: Literal['one', 'two'], more: Literal[0, 1]): ...\n" + RESPOND,
    ),
    "a literal that is computed": (
        WRONG,
        "class X:\n    def __init__(self, hints: Literal[ONE], more: int): ...\n" + RESPOND,
    ),
    "an annotated type": (
        WRONG,
        "class X:\n    def __init__(self, hints: Annotated[str, 1], more: int): ...\n" + RESPOND,
    ),
    "a default of another type": (
        WRONG,
        "class X:\n    def __init__(self, hints: int = 'one', more: int = 0): ...\n" + RESPOND,
    ),
    "None for a default of None": (
        HINTS.replace("2", "null"),
        "class X:\n    def __init__(self, hints: int = None): ...\n" + RESPOND,
    ),
    "a list for a tuple": (
        HINTS.replace("2", "[1, 2]"),
        "class X:\n    def __init__(self, hints: tuple[int, ...]): ...\n" + RESPOND,
    ),
    "a list for a set": (
        HINTS.replace("2", "[1, 2]"),
        "class X:\n    def __init__(self, hints: set[int]): ...\n" + RESPOND,
    ),
    "an int for a float": (HINTS, "class X:\n    def __init__(self, hints: float): ...\n" + RESPOND),
    "text for a sequence": (
        HINTS.replace("2", "two"),
        "class X:\n    def __init__(self, hints: Sequence[str]): ...\n" + RESPOND,
    ),
    "a mapping": (
        HINTS.replace("2", "{a: [1]}"),
        "class X:\n    def __init__(self, hints: Mapping[str, list[int]]): ...\n" + RESPOND,
    ),
    "a value from a variable": (HINTS.replace("2", '"${HINTS:two}"'), "class X:\n" + INIT + RESPOND),
    "no result annotation": (USER, "class X:\n    def respond(self, view): return 'x'"),
    "a result that may be right": (USER, "class X:\n    def respond(self, view) -> UserTurn | None: ..."),
    "an awaitable result": (USER, "class X:\n    def respond(self, view) -> Awaitable[UserTurn]: ..."),
    "an async method": (USER, "class X:\n    async def respond(self, view) -> UserTurn: ..."),
    "a derived result": (USER, "class Mine(UserTurn): ...\nclass X:\n    def respond(self, view) -> Mine: ..."),
    "a result that cannot be read": (
        USER,
        "from nowhere_at_all import Turn\nclass X:\n    def respond(self, view) -> Turn: ...",
    ),
    "a result of a type variable": (USER, "class X:\n    def respond(self, view: T) -> T: ..."),
    "a result that never comes": (USER, "class X:\n    def respond(self, view) -> NoReturn: ..."),
    "Any result": (USER, "class X:\n    def respond(self, view) -> Any: ..."),
    "a quoted result": (USER, "class X:\n    def respond(self, view) -> 'UserTurn': ..."),
    "a class from the engine's Protocol": (USER, "class X(User):\n" + RESPOND),
    "an abstract base": (
        USER,
        "class A(abc.ABC):\n    @abc.abstractmethod\n    def respond(self, view): ...\nclass X(A):\n" + RESPOND,
    ),
    "a static method": (USER, "class X:\n    @staticmethod\n    def respond(view): ..."),
    "a class method": (USER, "class X:\n    @classmethod\n    def respond(cls, view): ..."),
    "any arguments": (USER, "class X:\n    def respond(*given): ..."),
    "a scorer": (
        'rewards: {scorer: {use: "parts:x"}}\nmachine: single_turn\n',
        "def x(view) -> list[RewardEvent]: ...",
    ),
    "a scorer of a sequence": (
        'rewards: {scorer: {use: "parts:x"}}\nmachine: single_turn\n',
        "def x(view) -> Sequence[RewardEvent]: ...",
    ),
    "a tool of a partial": (TOOL, "def f(a: int, b: int): ...\nx = functools.partial(f, b=1)"),
    "a tool of an object": (TOOL, "x = Made()"),
    "a decorated tool": (TOOL, "@register\ndef x(*given): ..."),
    "a tool with a view": (
        TOOL,
        "def x(a: int, view: EpisodeView) -> ToolReply:\n    '''Do.\n\n    Args:\n        a: One.\n    '''",
    ),
    "a tool of a dict": (TOOL, "def x(a: 'list[int]', *, b: Literal['c'] = 'c') -> dict[str, Any]: 'Do.'"),
    "rows": (
        'tasks: {source: python, use: "parts:x"}\nmachine: single_turn\n',
        "def x() -> Iterable[dict[str, str]]: yield {'q': 'a'}",
    ),
}


@pytest.mark.parametrize("name", slow_but_each(2, OPEN))
def test_what_the_text_leaves_open_is_no_mistake(name: str) -> None:
    assert found(*OPEN[name]) == []


REEXPORTED = {
    "shop/__init__.py": "from .people import Clerk as X\n",
    "shop/people.py": "from shop.base import Base\nclass Clerk(Base): ...\n",
}


@pytest.mark.parametrize(
    ("spec", "files", "problems"),
    [
        (
            'user: {use: "shop:X", with: {hint: 2}}\nmachine: retry_with_feedback\n',
            REEXPORTED | {"shop/base.py": "class Base:\n    def __init__(self, hints: int = 1): ...\n"},
            [
                "code.protocol: `shop:X` has no method `respond`, so it is not a user",
                "code.protocol: `shop:X` takes no argument `hint`",
            ],
        ),
        (
            'user: {use: "shop:X", with: {hints: two}}\nmachine: retry_with_feedback\n',
            REEXPORTED
            | {
                "shop/base.py": "from engine.schemas import environment as env\nHints = int | None\n"
                "class Base:\n    def __init__(self, hints: Hints = 1): ...\n    def respond(self, view: env.EpisodeView) -> env.Step: ...\n"
            },
            [
                "code.returns: `shop:X.respond` is annotated `-> env.Step` (base.py:5), and must return a `UserTurn`",
                'code.with-type: `shop:X` takes `hints: Hints`; it is the text "two"',
            ],
        ),
    ],
)
def test_mistakes_are_found_through_reexports_bases_and_aliases(
    spec: str, files: dict[str, str], problems: list[str]
) -> None:
    assert found(spec, "", files) == problems


def test_the_order_of_bases_is_that_of_python() -> None:
    code = "class A:\n    def respond(self): ...\nclass B(A): ...\nclass C(A):\n" + RESPOND + "class X(B, C): ...\n"
    assert found(USER, code) == []
    assert found(USER, code.replace("X(B, C)", "X(A)")) == [
        "code.protocol: `parts:X.respond` cannot be called: too many positional arguments"
    ]


def test_a_method_that_a_protocol_only_declares_is_missing() -> None:
    assert found(USER, "class X(User):\n    def answer(self, view): ...") == [
        "code.protocol: `parts:X` has no method `respond`, so it is not a user"
    ]


GUARD = """\
user: {use: "parts:X"}
machine:
  preset: retry_with_feedback
  transitions:
    - {trigger: feedback, source: AWAITING_USER_FEEDBACK, dest: DONE, conditions: facts.wrong > 2}
    - {trigger: feedback, source: AWAITING_USER_FEEDBACK, dest: GENERATING}
rewards:
  reassign:
    - {at: AWAITING_USER_FEEDBACK, turn: last, to: first, share: 0.3, name: right, when: turns.assistant > 1}
"""
NOBODY = [
    "guard.unknown-fact: nothing writes the fact `facts.wrong`: the code of environments, users and tools does not mention it",
    "rewards.unknown-name: nothing writes a reward `right`: no rule does, and the code of environments, users and tools does not mention it",
]
TURN = "class X:\n    def respond(self, view):\n        return UserTurn(content='no', {})\n"


@pytest.mark.parametrize(
    "code",
    slow_but_each(
        2,
        [
            TURN.format("facts={'wrong': 1}, rewards=[RewardEvent(name='right', value=1.0)]"),
            TURN.format("facts=dict(wrong=1), rewards=[RewardEvent(name='right' if 1 else 'x', value=1.0)]"),
            TURN.format("facts=self.facts(), rewards=[RewardEvent(name=self.kind, value=1.0)]"),
            TURN.format("facts=vars(self), rewards=[RewardEvent(name=f'r{1}', value=1.0)]"),
            TURN.format("facts={key: 1 for key in KEYS}, rewards=[RewardEvent(**given)]"),
            TURN.format("facts={f'{a}': 1}, rewards=[RewardEvent(**given)]"),
            TURN.format("facts={**other}, rewards=[RewardEvent(**given)]"),
            TURN.format("facts=facts | other(), rewards=[RewardEvent(**given)]"),
            TURN.format("**made"),
            "class X:\n    def respond(self, view):\n        return UserTurn.model_validate(self.turn)\n",
            "class X:\n    def respond(self, view):\n        facts = {}\n        facts[self.key] = 1\n"
            "        return UserTurn(content='no', facts=facts, rewards=[RewardEvent(**given)])\n",
            "class X:\n    def respond(self, view):\n        facts = {}\n        facts.update(self.more)\n"
            "        return UserTurn(content='no', facts=facts, rewards=[RewardEvent(**given)])\n",
            "class X:\n    def respond(self, view, facts={}):\n"
            "        return UserTurn(content='no', facts=facts, rewards=[RewardEvent(**given)])\n",
            "from engine.schemas.environment import UserTurn as Turn\nclass X:\n    def respond(self, view):\n        return Turn(**self.turn)\n",
            "class Turn(UserTurn): ...\nclass X:\n    def respond(self, view):\n        return Turn(**self.turn)\n",
            "def X():\n    return make()\n",
            "from nowhere_at_all import Base\nclass X(Base):\n    def respond(self, view): ...\n",
            "from helpers import turn\nclass X:\n    def respond(self, view):\n        return turn()\n",
        ],
    ),
)
def test_a_name_that_code_may_write_is_no_mistake(code: str) -> None:
    helpers = "def turn():\n    return UserTurn(facts={'wrong': 1}, rewards=[RewardEvent(name='right', value=1.0)])\n"
    assert found(GUARD, code, {"helpers.py": helpers}) == []


@pytest.mark.parametrize(
    "code",
    [
        TURN.format("facts={'mistakes': 1}, rewards=[RewardEvent(name='correct', value=1.0)]"),
        TURN.format("facts={**view.facts, 'mistakes': 1}, rewards=[RewardEvent(value=1.0)]"),
        "class A:\n    facts = {'mistakes': 1}\nclass X(A):\n    def respond(self, view):\n        return UserTurn(content='no', facts=self.facts)\n",
        "class X:\n    def _facts(self):\n        return {'mistakes': 1}\n    def respond(self, view):\n"
        "        facts = self._facts()\n        facts['more'] = 2\n        return UserTurn(content='no', facts=facts)\n",
    ],
)
def test_a_name_that_nobody_writes_is_a_warning(code: str) -> None:
    assert found(GUARD, code) == NOBODY
