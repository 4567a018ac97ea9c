"""`@environment`: a whole environment as one function.

    @environment
    def guess_number(task: Task, seed: int, most: int = 20) -> Dialogue:
        secret = random.Random(seed).randint(1, most)
        view = yield f"Guess my number, from 1 to {most}."
        while view.reply.strip() != str(secret):
            view = yield Say("No.", rewards={"miss": -0.1})
        yield End(rewards={"won": 1.0}, solved=True)

A spec names it as any environment, and its machine asks it after each reply: `machine: step`, or `tools_and_step` with
tools. Each `yield` gives the next message and receives the view of the reply to it. Parameters other than `task`,
`seed` and `view` are taken from the spec's `with`. The function may be

- a generator, plain or `async`: its local variables are the state, so `effects: replayable` (the default) rebuilds it;
- a plain or `async` function with the parameter `view`, which is None before the first reply: it keeps its state in the
  facts that it returns (`view.facts`), so `effects: pure` is right, and a resume calls nothing again.

Invariant: the decorated name is a class with `reset`, `step` and `events` as docs/environments.md describes, so checks,
worker processes and resume know nothing of this form.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeAlias, overload

from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import ContentPart, Message
from engine.schemas.reward import RewardEvent


@dataclass(frozen=True, slots=True)
class Say:
    """The next message to the model, with what its newest reply earned.

    Say("Higher.", rewards={"near": 0.1}, facts={"tries": 2})
    """

    content: str | list[ContentPart]
    """The text, or text and image parts; shown as a message of role `user`."""
    _: KW_ONLY
    rewards: Mapping[str, float] | list[RewardEvent] = field(default_factory=dict)
    """Rewards of the newest reply by name; or events, also of earlier turns. None before the first reply."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Values for guards (`facts.tries`), graders and the trace; the model does not see them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of the episode, with what its last reply earned.

    End(rewards={"won": 1.0}, solved=True)
    """

    rewards: Mapping[str, float] | list[RewardEvent] = field(default_factory=dict)
    """As those of `Say`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """As those of `Say`."""
    solved: bool = False
    """Whether the task is solved; also the fact `solved`."""


Answer: TypeAlias = str | list[ContentPart] | Say | End
"""What the function gives at each turn; a text or a list of parts is a `Say` without rewards."""
Dialogue: TypeAlias = Generator[Answer, EpisodeView, End | None]
"""Return type of a generator. Its end, without an `End`, is `End()`."""
AsyncDialogue: TypeAlias = AsyncGenerator[Answer, EpisodeView]
"""Return type of an `async` generator."""

_OURS = ("task", "seed", "view")


class _FunctionEnvironment:
    """What the four forms share. Subclasses are made by `environment`."""

    events: ClassVar[tuple[str, ...]] = ("continue", "done")
    keeps_state: ClassVar[bool]
    """Whether state is kept between calls, outside of the facts."""
    _function: ClassVar[Callable[..., Any]]
    _names: ClassVar[frozenset[str]]
    """Which of `task`, `seed` and `view` the function takes."""

    def __init__(self, **settings: Any) -> None:
        signature: inspect.Signature = type(self).__signature__  # type: ignore[attr-defined]
        signature.bind(**settings)
        self._settings = settings
        self._turns: Any = None
        """The running generator; None before `reset`."""

    def _call(self, task: Task, seed: int, view: EpisodeView | None) -> Any:
        given = {"task": task, "seed": seed, "view": view}
        ours = {name: value for name, value in given.items() if name in self._names}
        return type(self)._function(**ours, **self._settings)

    def _running(self) -> Any:
        if self._turns is None:
            raise RuntimeError(
                f"`{type(self).__name__}` is a generator, and its state is gone: write `effects: replayable` "
                "in the spec"
            )
        return self._turns


class _Generator(_FunctionEnvironment):
    keeps_state = True

    def reset(self, task: Task, seed: int) -> Reset:
        self._turns = self._call(task, seed, None)
        return _reset(next(self._turns, None), type(self).__name__)

    def step(self, view: EpisodeView) -> Step:
        try:
            return _step(self._running().send(view), type(self).__name__)
        except StopIteration as stop:
            return _step(End() if stop.value is None else stop.value, type(self).__name__)

    def close(self) -> None:
        if self._turns is not None:
            self._turns.close()


class _AsyncGenerator(_FunctionEnvironment):
    keeps_state = True

    async def reset(self, task: Task, seed: int) -> Reset:
        self._turns = self._call(task, seed, None)
        return _reset(await anext(self._turns, None), type(self).__name__)

    async def step(self, view: EpisodeView) -> Step:
        try:
            return _step(await self._running().asend(view), type(self).__name__)
        except StopAsyncIteration:
            return _step(End(), type(self).__name__)

    async def close(self) -> None:
        if self._turns is not None:
            await self._turns.aclose()


class _Function(_FunctionEnvironment):
    keeps_state = False

    def reset(self, task: Task, seed: int) -> Reset:
        return _reset(self._call(task, seed, None), type(self).__name__)

    def step(self, view: EpisodeView) -> Step:
        return _step(self._call(view.task, view.seed, view), type(self).__name__)


class _AsyncFunction(_FunctionEnvironment):
    keeps_state = False

    async def reset(self, task: Task, seed: int) -> Reset:
        return _reset(await self._call(task, seed, None), type(self).__name__)

    async def step(self, view: EpisodeView) -> Step:
        return _step(await self._call(view.task, view.seed, view), type(self).__name__)


_FORMS: Sequence[tuple[Callable[[Any], bool], type[_FunctionEnvironment]]] = (
    (inspect.isgeneratorfunction, _Generator),
    (inspect.isasyncgenfunction, _AsyncGenerator),
    (inspect.iscoroutinefunction, _AsyncFunction),
    (callable, _Function),
)


@overload
def environment(function: Callable[..., Any], /) -> type[_FunctionEnvironment]: ...
@overload
def environment(
    *, tools: Sequence[Callable[..., Any]] = ()
) -> Callable[[Callable[..., Any]], type[_FunctionEnvironment]]: ...
def environment(function: Callable[..., Any] | None = None, /, *, tools: Sequence[Callable[..., Any]] = ()) -> Any:
    """Make an environment of a function. See the module's docstring.

        @environment(tools=[compare])

    Args:
        function: The function, where the decorator is used without parentheses.
        tools: Tools that the environment offers: typed functions, as docs/environments.md describes. They share state
            with the function by facts: `ToolReply(facts=…)`, and `view.facts` of a parameter annotated `EpisodeView`.

    Raises:
        TypeError: The function has a parameter that cannot be given by name, is a generator with the parameter `view`,
            or is no generator and lacks it.
    """
    if function is None:
        return partial(environment, tools=tools)
    form = next(form for test, form in _FORMS if test(function))
    name = getattr(function, "__name__", "environment")
    signature = inspect.signature(function)
    _check(name, signature, form)
    settings = [item for item in signature.parameters.values() if item.name not in _OURS]
    keywords = [
        item if item.kind is item.VAR_KEYWORD else item.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for item in settings
    ]
    members: dict[str, Any] = {
        "__doc__": function.__doc__,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__signature__": inspect.Signature(keywords),
        "_function": staticmethod(function),
        "_names": frozenset(_OURS) & signature.parameters.keys(),
    }
    if tools:
        members["tools"] = lambda self: list(tools)
    return type(name, (form,), members)


def _check(name: str, signature: inspect.Signature, form: type[_FunctionEnvironment]) -> None:
    for item in signature.parameters.values():
        if item.kind in (item.POSITIONAL_ONLY, item.VAR_POSITIONAL):
            raise TypeError(f"`{name}`: the parameter `{item.name}` must be one that can be given by name")
    if form.keeps_state and "view" in signature.parameters:
        raise TypeError(
            f"`{name}` is a generator: it receives each view as the value of `yield`; remove the parameter `view`"
        )
    if not form.keeps_state and "view" not in signature.parameters:
        raise TypeError(
            f"`{name}` has no `yield`, so it needs the parameter `view`, which is None before the first reply"
        )


def _said(answer: Any, name: str) -> Say | End:
    if isinstance(answer, Say | End):
        return answer
    if isinstance(answer, str | list):
        return Say(answer)
    raise TypeError(f"`{name}` gave {type(answer).__name__}; give a text, a list of parts, `Say(…)` or `End(…)`")


def _reset(answer: Any, name: str) -> Reset:
    """The first answer, as `reset` gives it."""
    if answer is None or isinstance(answer, End):
        raise ValueError(f"`{name}` ended the episode before the first reply; its first answer must be a message")
    said = _said(answer, name)
    if said.rewards:
        raise ValueError(f"`{name}` gave rewards before the first reply; there is no turn to reward")
    assert isinstance(said, Say)
    return Reset(messages=[Message(role="user", content=said.content)], facts=dict(said.facts))


def _step(answer: Any, name: str) -> Step:
    """A later answer, as `step` gives it."""
    said = _said(answer, name)
    rewards = said.rewards
    if not isinstance(rewards, list):
        rewards = [RewardEvent(name=key, value=value, cause=name) for key, value in rewards.items()]
    if isinstance(said, End):
        return Step(event="done", rewards=rewards, facts={"solved": said.solved, **said.facts})
    return Step(
        event="continue", messages=[Message(role="user", content=said.content)], rewards=rewards, facts=dict(said.facts)
    )
