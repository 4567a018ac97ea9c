"""Rules about environments, tools, users, scorers and actions of a spec: they can be imported and called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from engine.actions.facts import ACTIONS, SCORERS
from engine.given import gone, is_given
from engine.moved_names import new_name
from engine.spec.added import Called, added_tools, spec_facts
from engine.spec.code.entry import EntryError, names_of
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import near_or_known, nearest_name
from engine.validate.code.code_facts import CodeFacts, Method, ReadCode
from engine.validate.code.source import NotImported
from engine.validate.context import CheckContext, NamedEntry, each_source, nearest
from engine.validate.registry import Finding, rule
from engine.validate.tools import environment_tools

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
    """`use` of environment, tools, user, scorer, tasks, bonuses and notices; actions of the spec; a parser."""
    for path, use in _named(ctx):
        thing = ctx.described(use)
        if is_given(use):
            continue  # the rule `code.given`
        if isinstance(thing, NotImported):
            if thing.definition is None:
                ctx.skip()
        elif isinstance(thing, EntryError):
            message, _, fix = str(thing).partition("; ")
            if ":" not in use:  # the nearest name that an installed package offers
                kind = next((item.role for item in ctx.spec_code if (*item.path, "use") == path), "")
                if names := [*names_of(kind), *(SCORERS if kind == "scorer" else ())]:
                    fix = f"{near_or_known(use, names)}; or write `package.module:Name`"
            yield Finding(message, path, fix or None)


@rule("code.given", "error", "an object that a program gave cannot be used where the spec runs it")
def given(ctx: CheckContext) -> Iterator[Finding]:
    """An object of another process, or one that is to run in worker processes."""
    for path, use in _named(ctx):
        if not is_given(use):
            continue
        name = use.partition(":")[2]
        fix = f"put it into a module beside the spec and write `module:{name}`"
        if not any(gone(use)) and use in ctx.isolated:
            yield Finding(
                f"`{name}` belongs to the program that gave it, and worker processes cannot import it",
                path,
                f"{fix}, or write `isolation: {{mode: thread}}`",
            )
        for problem in gone(use):
            yield Finding(problem.partition("; ")[0], path, fix)


@rule("code.moved", "warning", "an entry point has the old name of something of the engine that moved")
def moved(ctx: CheckContext) -> Iterator[Finding]:
    """A row of `engine.moved_names`."""
    for path, use in _named(ctx):
        if (new := new_name(use)) is not None:
            yield Finding(f"`{use}` is `{new}` now, and is read as that", path, f"write `{new}`")


def _named(ctx: CheckContext) -> list[tuple[DataPath, str]]:
    """The entry points of a spec, with their places."""
    named: list[tuple[DataPath, str]] = [((*item.path, "use"), item.entry.use) for item in ctx.spec_code]
    named += [((*ctx.state_path(name), "action"), str(state.action)) for name, state in ctx.own_actions]
    if ":" in ctx.spec.model.tool_calls:
        named.append((("model", "tool_calls"), ctx.spec.model.tool_calls))
    return named + [(call.path, call.use) for call in called(ctx)]


@rule(
    "code.protocol",
    "error",
    "an environment, tool, user or scorer lacks a method, or cannot be called as the engine calls it",
)
def fits_the_calls(ctx: CheckContext) -> Iterator[Finding]:
    """Environments and users have their methods; tools have typed parameters; `with` fits the constructor."""
    for item in ctx.spec_code:
        thing = ctx.code(item.entry.use)
        if thing is None:
            continue
        if item.added is not None:
            call = call_of(item, *item.added.takes)
            with_ = {**dict.fromkeys(item.added.keywords), **call.with_}
            yield from _function(ctx, thing, replace(call, with_=with_))
            if item.added.awaited and thing.kind == "function" and thing.awaited is False:
                yield Finding(
                    f"`{item.entry.use}` is not a coroutine function, so it cannot be cancelled at a limit",
                    (*item.path, "use"),
                    item.added.awaited,
                )
        elif item.role == "scorer":
            yield from _function(ctx, thing, call_of(item, "view"))
        else:
            yield from (_tool if item.role == "tool" else _built)(ctx, item, thing)
    for call in called(ctx):
        function = ctx.code(call.use)
        if function is not None:
            yield from _function(ctx, function, call)


def called(ctx: CheckContext) -> Iterator[Called]:
    """The functions that make tasks, bonuses and notices."""
    for at, source in each_source(ctx):
        tasks = source.spec.tasks
        if tasks.source == "python" and tasks.use:
            yield Called(
                use=tasks.use,
                arguments=(),
                with_=tasks.with_,
                path=(*at, "use"),
                path_with=(*at, "with"),
                may_be_class=True,
            )
    for facts in spec_facts(ctx.spec):
        yield from facts.called
    train = ctx.spec.train
    if train is None:
        return
    for index, bonus in enumerate(train.advantage_bonuses):
        path: DataPath = ("train", "advantage_bonuses", index)
        yield Called(
            use=bonus.use, arguments=("row",), with_=bonus.with_, path=(*path, "use"), path_with=(*path, "with")
        )


def _built(ctx: CheckContext, item: NamedEntry, thing: CodeFacts) -> Iterator[Finding]:
    """Check an environment or a user: it is called with `with` and returns an object with methods."""
    yield from call_problems(ctx, thing, call_of(item))
    if thing.kind != "class":
        return  # what a function returns is known only when it runs
    name, arguments = METHODS[item.role]
    method = thing.method(name)
    if method == "missing":
        article = "an" if item.role == "environment" else "a"
        yield Finding(
            f"`{item.entry.use}` has no method `{name}`, so it is not {article} {item.role}",
            (*item.path, "use"),
            f"add `def {name}({', '.join(['self', *arguments])})`",
        )
    elif method == "unknown":
        ctx.skip()
    yield from _methods(item, thing, {name: arguments, **OPTIONAL[item.role]})


def call_of(item: NamedEntry, *arguments: str) -> Called:
    """Return how an environment, tool, user or scorer is built or called."""
    return Called(
        use=item.entry.use,
        arguments=arguments,
        with_=item.entry.with_,
        path=(*item.path, "use"),
        path_with=(*item.path, "with"),
    )


def _methods(item: NamedEntry, thing: CodeFacts, methods: Mapping[str, tuple[str, ...]]) -> Iterator[Finding]:
    for name, arguments in methods.items():
        method = thing.method(name)
        problem = _binding(method.signature, arguments, {}) if isinstance(method, Method) else None
        if problem:
            yield Finding(
                f"`{item.entry.use}.{name}` cannot be called: {problem}",
                (*item.path, "use"),
                f"it is called as `{name}({', '.join(arguments)})`",
            )


def _tool(ctx: CheckContext, item: NamedEntry, thing: CodeFacts) -> Iterator[Finding]:
    """Check a tool: a typed function, or a class whose objects are called."""
    use = (*item.path, "use")
    if thing.kind == "unknown":
        ctx.skip()
    elif thing.kind == "value":
        yield Finding(f"`{item.entry.use}` is {thing.what}, not a function", use, "use a typed function or a class")
    elif thing.kind == "class":
        yield from call_problems(ctx, thing, call_of(item))
        call = thing.method("__call__")
        if call == "missing":
            yield Finding(
                f"objects of `{item.entry.use}` cannot be called, so it is not a tool",
                use,
                "add `def __call__(self, …)` with typed parameters",
            )
        elif call == "unknown":
            ctx.skip()
        yield from _methods(item, thing, OPTIONAL["tool"])
    elif item.entry.with_:
        yield Finding(
            f"`{item.entry.use}` is a function: it takes its arguments from the model, not from `with`",
            (*item.path, "with"),
            "make it a class that takes them and has `__call__`, or remove `with`",
            key=True,
        )
    called_as = getattr(item.entry, "name", None)
    if thing.kind in ("class", "function") and (problem := thing.tool_problem(called_as)) is not None:
        message, _, fix = problem.partition("; ")
        yield Finding(message, use, fix or None)


def _function(ctx: CheckContext, thing: CodeFacts, call: Called) -> Iterator[Finding]:
    if thing.kind == "class" and not call.may_be_class:
        takes = f"the {call.arguments[0]}" if call.arguments else ", ".join(call.with_)
        yield Finding(
            f"`{call.use}` is a class, and a function is called here", call.path, f"name a function that takes {takes}"
        )
    else:
        yield from call_problems(ctx, thing, call)


@rule("code.action", "error", "an action of the spec's own declares no events, or cannot be called")
def action_protocol(ctx: CheckContext) -> Iterator[Finding]:
    """A function with `events`, called with the view and the state's `with`; `step` needs the environment's."""
    for call in actions(ctx):
        thing = ctx.code(call.use)
        if thing is None:
            continue
        yield from _function(ctx, thing, call)
        if thing.kind != "unknown" and thing.events() == "missing":
            yield Finding(
                f"`{call.use}` declares no events",
                call.path,
                'decorate it: `from engine.schemas.environment import action`, then `@action("done")`',
            )
    for name, state in ctx.states.items():
        facts = ACTIONS.get(str(state.action))
        if facts is not None and facts.events is None:
            yield from _step(ctx, (*ctx.state_path(name), "action"))


def actions(ctx: CheckContext) -> list[Called]:
    """The actions of the spec's own."""
    return [
        Called(
            use=str(state.action),
            arguments=("view",),
            with_=state.with_,
            path=(*ctx.state_path(name), "action"),
            path_with=(*ctx.state_path(name), "with"),
        )
        for name, state in ctx.own_actions
    ]


def _step(ctx: CheckContext, path: DataPath) -> Iterator[Finding]:
    environment = ctx.spec.environment
    if environment is None:
        yield Finding(
            "the action `step` asks the environment, and the spec has none", path, "add `environment: {use: …}`"
        )
        return
    use = environment.entry.use
    thing = ctx.code(use)
    if thing is None:
        return
    if thing.kind == "class" and thing.method("step") == "missing":
        yield Finding(
            f"the action `step` asks `{use}`, which has no method `step`", path, "add `def step(self, view) -> Step`"
        )
    if thing.events() == "missing":
        yield Finding(
            f"`{use}` declares no events for the action `step`",
            path,
            'give it `events = ("done",)`: what its steps may answer',
        )


@rule("user.missing", "error", "a state asks the user, and the spec has none")
def no_user(ctx: CheckContext) -> Iterator[Finding]:
    """A reachable state with the action `ask_user`."""
    if not ctx.users:
        for name in ctx.performing("ask_user"):
            yield Finding(
                f"`{name}` asks the user, and the spec has none",
                ctx.state_path(name),
                "add `user: {use: …}`, or use a machine without one (`machine: tools` or `single_turn`)",
                key=True,
            )


@rule("tools.missing", "warning", "a state calls tools, and the spec has none")
def no_tools(ctx: CheckContext) -> Iterator[Finding]:
    """A reachable state with the action `call_tools`, and neither `tools` nor an environment with `tools()`."""
    if ctx.spec.tools or added_tools(ctx.spec) or environment_tools(ctx) is not False:
        return
    for name in ctx.performing("call_tools"):
        yield Finding(
            f"`{name}` calls tools, and the spec has none",
            ctx.state_path(name),
            "add `tools: [{use: …}]`, or use a machine without them (`machine: retry_with_feedback` or `single_turn`)",
            key=True,
        )


def call_problems(ctx: CheckContext, thing: CodeFacts, call: Called) -> Iterator[Finding]:
    """Yield what is wrong with a call."""
    use, arguments, with_ = call.use, call.arguments, call.with_
    if thing.kind == "value":
        yield Finding(f"`{use}` cannot be called: it is {thing.what}", call.path, "name a class or a function")
        return
    signature = thing.signature if thing.kind != "unknown" else None
    if signature is None:
        if isinstance(thing, ReadCode):
            ctx.skip()
        return
    kinds = {item.kind for item in signature.parameters.values()}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = [name for name, item in signature.parameters.items() if item.kind in by_name]
    unknown: list[str] = []
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        unknown = [key for key in with_ if key not in accepted]
        known = [name for name in accepted if name not in arguments]
        for key in unknown:
            yield Finding(f"`{use}` takes no argument `{key}`", (*call.path_with, key), nearest(key, known), key=True)
        with_ = {key: value for key, value in with_.items() if key in accepted}
    missing = [  # what `with` could supply, after the positional arguments
        item.name
        for index, item in enumerate(signature.parameters.values())
        if item.default is item.empty
        and (item.kind is item.KEYWORD_ONLY or (item.kind is item.POSITIONAL_OR_KEYWORD and index >= len(arguments)))
        and item.name not in with_
    ]
    misspelled = {nearest_name(key, missing, cutoff=0.5) for key in unknown}
    missing = [name for name in missing if name not in misspelled]
    for name in missing:
        yield Finding(f"`{use}` needs the argument `{name}`", call.path, f"add `with: {{{name}: …}}`")
    problem = None if missing or misspelled - {None} else _binding(signature, arguments, with_)
    if problem:
        yield Finding(
            f"`{use}` cannot be called: {problem}", call.path, f"it is called with ({', '.join([*arguments, *with_])})"
        )


def _binding(signature: inspect.Signature | None, positional: tuple[str, ...], named: Mapping[str, Any]) -> str | None:
    """Why a call does not match a signature; None if it does, or if the signature is not known."""
    try:
        if signature is not None:
            signature.bind(*positional, **named)
    except TypeError as error:
        return str(error)
    return None
