"""Rules about environments, tools, users, scorers and actions of a spec: they can be imported and called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.actions.facts import ACTIONS
from engine.checks.context import CheckContext, NamedEntry, nearest
from engine.checks.registry import Finding, rule
from engine.checks.sources import each_source
from engine.checks.tools import environment_tools
from engine.spec.diagnostic import DataPath
from engine.spec.entry import EntryError
from engine.spec.source import NotImported

METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "environment": ("reset", ("task", "seed")),
    "user": ("respond", ("view",)),
    "tool server": ("open", ()),
}
"""The method that an environment, a user or a server of tools must have, and its arguments."""
OPTIONAL: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "environment": {"step": ("view",), "score": ("view",), "tools": (), "close": ()},
    "user": {"close": ()},
    "tool": {"close": ()},
    "tool server": {"close": ()},
}
"""Optional methods, and their arguments."""


@rule("code.import", "error", "an entry point cannot be imported")
def entry_imports(ctx: CheckContext) -> Iterator[Finding]:
    """`use` of environment, tools, user, scorer, python tasks, bonuses and notices; actions of the spec's own; a parser."""
    named: list[tuple[DataPath, str]] = [((*item.path, "use"), item.entry.use) for item in ctx.spec_code]
    named += [((*ctx.state_path(name), "action"), str(state.action)) for name, state in ctx.own_actions]
    for at, source in each_source(ctx):
        if source.spec.tasks.source == "python" and source.spec.tasks.use:
            named.append(((*at, "use"), source.spec.tasks.use))
    if ":" in ctx.spec.model.tool_calls:
        named.append((("model", "tool_calls"), ctx.spec.model.tool_calls))
    named += [(path, use) for path, use, _, _ in _called(ctx)]
    for path, use in named:
        thing = ctx.described(use)
        if isinstance(thing, NotImported):
            if thing.node is None:
                ctx.skip()
        elif isinstance(thing, EntryError):
            message, _, fix = str(thing).partition("; ")
            yield Finding(message, path, fix or None)


@rule(
    "code.protocol",
    "error",
    "an environment, tool, user or scorer lacks a method, or cannot be called as the engine calls it",
)
def fits_the_calls(ctx: CheckContext) -> Iterator[Finding]:
    """Environments and users have their methods; tools have typed parameters; `with` fits the constructor."""
    for item in ctx.spec_code:
        thing = ctx.entry(item.entry.use)
        if not isinstance(thing, EntryError):
            yield from _WORLDS[item.role](item, thing)
    for at, source in each_source(ctx):
        tasks = source.spec.tasks
        if tasks.source == "python" and tasks.use:
            rows = ctx.entry(tasks.use)
            if not isinstance(rows, EntryError):
                yield from _call(rows, tasks.use, (), tasks.with_, (*at, "use"), (*at, "with"))
    for path, use, arguments, with_ in _called(ctx):
        function = ctx.entry(use)
        if not isinstance(function, EntryError):
            yield from _function(function, use, with_, path, (*path[:-1], "with"), arguments)


def _called(ctx: CheckContext) -> Iterator[tuple[DataPath, str, tuple[str, ...], Mapping[str, Any]]]:
    """Functions of `train`: position, entry point, arguments and `with`."""
    train = ctx.spec.train
    if train is None:
        return
    for index, bonus in enumerate(train.advantage_bonuses):
        yield ("train", "advantage_bonuses", index, "use"), bonus.use, ("row",), bonus.with_
    if train.notify.use is not None:
        yield ("train", "notify", "use"), train.notify.use, ("event",), {}


def _built(item: NamedEntry, thing: Any) -> Iterator[Finding]:
    """Check an environment or a user: it is called with `with` and returns an object with methods."""
    use = (*item.path, "use")
    yield from _call(thing, item.entry.use, (), item.entry.with_, use, (*item.path, "with"))
    if not inspect.isclass(thing):
        return  # what a function returns is known only when it runs
    name, arguments = METHODS[item.role]
    if not callable(getattr(thing, name, None)):
        article = "an" if item.role[0] in "aeiou" else "a"
        fix = f"add `def {name}(self, {', '.join(arguments)})`"
        yield Finding(f"`{item.entry.use}` has no method `{name}`, so it is not {article} {item.role}", use, fix)
    yield from _methods(item, thing, {name: arguments, **OPTIONAL[item.role]})


def _methods(item: NamedEntry, thing: type, methods: Mapping[str, tuple[str, ...]]) -> Iterator[Finding]:
    for name, arguments in methods.items():
        method = getattr(thing, name, None)
        if callable(method):
            words = f"`{item.entry.use}.{name}`"
            problem = _binding(method, (*_instance(thing, name), *arguments), {})
            if problem:
                fix = f"it is called as `{name}({', '.join(arguments)})`"
                yield Finding(f"{words} cannot be called: {problem}", (*item.path, "use"), fix)


def _instance(owner: type, name: str) -> tuple[str, ...]:
    """`self`, if a method that is taken from its class needs it."""
    return () if isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod) else ("self",)


def _tool(item: NamedEntry, thing: Any) -> Iterator[Finding]:
    """Check a tool: a typed function, or a class whose objects are called."""
    use = (*item.path, "use")
    if inspect.isclass(thing):
        yield from _call(thing, item.entry.use, (), item.entry.with_, use, (*item.path, "with"))
        if "__call__" not in dir(thing):  # `callable` of a class is always true
            fix = "add `def __call__(self, …)` with typed parameters"
            yield Finding(f"objects of `{item.entry.use}` cannot be called, so it is not a tool", use, fix)
        yield from _methods(item, thing, OPTIONAL["tool"])
        return
    if not callable(thing):
        yield Finding(f"`{item.entry.use}` is {_kind(thing)}, not a function", use, "use a typed function or a class")
        return
    if item.entry.with_:
        fix = "make it a class that takes them and has `__call__`, or remove `with`"
        yield Finding(
            f"`{item.entry.use}` is a function: it takes its arguments from the model, not from `with`",
            (*item.path, "with"),
            fix,
            key=True,
        )
    from engine.spec.signature import shape_of

    try:
        shape_of(thing, getattr(item.entry, "name", None))
    except (TypeError, NameError, AttributeError, ValueError) as error:
        message, _, fix = str(error).partition("; ")
        yield Finding(message, use, fix or None)


def _scorer(item: NamedEntry, thing: Any) -> Iterator[Finding]:
    """Check a scorer: a function of the episode's view."""
    yield from _function(thing, item.entry.use, item.entry.with_, (*item.path, "use"), (*item.path, "with"))


def _function(
    thing: Any,
    use: str,
    with_: Mapping[str, Any],
    at: DataPath,
    at_with: DataPath,
    arguments: tuple[str, ...] = ("view",),
) -> Iterator[Finding]:
    if inspect.isclass(thing):
        fix = f"name a function that takes the {arguments[0]}"
        yield Finding(f"`{use}` is a class, and a function is called here", at, fix)
    else:
        yield from _call(thing, use, arguments, with_, at, at_with)


_WORLDS: Mapping[str, Callable[[NamedEntry, Any], Iterator[Finding]]] = {
    "environment": _built,
    "user": _built,
    "tool": _tool,
    "tool server": _built,
    "scorer": _scorer,
}


@rule("code.action", "error", "an action of the spec's own declares no events, or cannot be called")
def action_protocol(ctx: CheckContext) -> Iterator[Finding]:
    """A function with `events`, called with the view and the state's `with`; `step` needs the environment's."""
    for name, state in ctx.own_actions:
        path = ctx.state_path(name)
        use = str(state.action)
        thing = ctx.entry(use)
        if isinstance(thing, EntryError):
            continue
        yield from _function(thing, use, state.with_, (*path, "action"), (*path, "with"))
        if ctx.declared(use) is None:
            fix = 'decorate it: `from engine.schemas.environment import action`, then `@action("done")`'
            yield Finding(f"`{use}` declares no events", (*path, "action"), fix)
    for name, state in ctx.states.items():
        facts = ACTIONS.get(str(state.action))
        if facts is not None and facts.events is None:
            yield from _step(ctx, (*ctx.state_path(name), "action"))


def _step(ctx: CheckContext, path: DataPath) -> Iterator[Finding]:
    environment = ctx.spec.environment
    if environment is None:
        yield Finding(
            "the action `step` asks the environment, and the spec has none", path, "add `environment: {use: …}`"
        )
        return
    use = environment.entry.use
    thing = ctx.entry(use)
    if isinstance(thing, EntryError):
        return
    if inspect.isclass(thing) and not callable(getattr(thing, "step", None)):
        fix = "add `def step(self, view) -> Step`"
        yield Finding(f"the action `step` asks `{use}`, which has no method `step`", path, fix)
    if ctx.declared(use) is None:
        fix = 'give it `events = ("done",)`: what its steps may answer'
        yield Finding(f"`{use}` declares no events for the action `step`", path, fix)


@rule("user.missing", "error", "a state asks the user, and the spec has none")
def no_user(ctx: CheckContext) -> Iterator[Finding]:
    """A reachable state with the action `ask_user`."""
    if not ctx.users:
        for name in ctx.speaking("user"):
            fix = "add `user: {use: …}`, or use a machine without one (`machine: tools` or `single_turn`)"
            yield Finding(f"`{name}` asks the user, and the spec has none", ctx.state_path(name), fix, key=True)


@rule("tools.missing", "warning", "a state calls tools, and the spec has none")
def no_tools(ctx: CheckContext) -> Iterator[Finding]:
    """A reachable state with the action `call_tools`, and neither `tools` nor an environment with `tools()`."""
    if ctx.spec.tools or environment_tools(ctx) is not False:
        return
    for name in ctx.speaking("tool"):
        fix = "add `tools: [{use: …}]`, or use a machine without them (`machine: retry_with_feedback` or `single_turn`)"
        yield Finding(f"`{name}` calls tools, and the spec has none", ctx.state_path(name), fix, key=True)


def _call(
    thing: Any, use: str, arguments: tuple[str, ...], with_: Mapping[str, Any], at: DataPath, at_with: DataPath
) -> Iterator[Finding]:
    """Check the call `thing(*arguments, **with_)`."""
    if not callable(thing):
        yield Finding(f"`{use}` cannot be called: it is {_kind(thing)}", at, "name a class or a function")
        return
    accepted = _accepted(thing)
    if accepted is not None:
        unknown = [key for key in with_ if key not in accepted]
        for key in unknown:
            known = [name for name in accepted if name not in arguments]
            yield Finding(f"`{use}` takes no argument `{key}`", (*at_with, key), nearest(key, known), key=True)
        with_ = {key: value for key, value in with_.items() if key in accepted}
    missing = _missing(thing, len(arguments), with_)
    for name in missing:
        yield Finding(f"`{use}` needs the argument `{name}`", at, f"add `with: {{{name}: …}}`")
    problem = None if missing else _binding(thing, arguments, with_)
    if problem:
        yield Finding(
            f"`{use}` cannot be called: {problem}", at, f"it is called with ({', '.join([*arguments, *with_])})"
        )


def _missing(thing: Any, given: int, with_: Mapping[str, Any]) -> list[str]:
    """Required arguments that are missing and that `with` could supply, after the `given` positional ones."""
    signature = _signature(thing)
    wanted = list(signature.parameters.values()) if signature else []
    return [
        item.name
        for index, item in enumerate(wanted)
        if item.default is item.empty
        and (item.kind is item.KEYWORD_ONLY or (item.kind is item.POSITIONAL_OR_KEYWORD and index >= given))
        and item.name not in with_
    ]


def _accepted(thing: Any) -> list[str] | None:
    """The arguments that can be passed by name; None if any can, or if this is not known."""
    signature = _signature(thing)
    if signature is None or any(item.kind is item.VAR_KEYWORD for item in signature.parameters.values()):
        return None
    return [
        name
        for name, item in signature.parameters.items()
        if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    ]


def _binding(function: Any, positional: tuple[str, ...], named: Mapping[str, Any]) -> str | None:
    """Why a call does not match a signature; None if it does, or if the signature is not known."""
    signature = _signature(function)
    if signature is None:
        return None
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        return str(error)
    return None


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _kind(thing: Any) -> str:
    name = type(thing).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
