"""What a chat template does, found by rendering it.

A template is a program that can loop for ever. Templates of the engine's catalogue are rendered in this process. If the
spec is untrusted, other templates are rendered in a child process with a deadline, which is started once, when it is
first needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from engine.errors import RenderError
from engine.processes.forked import Child, ChildError

SECONDS = 10.0
"""Deadline of the child for one template, in seconds."""
MEMORY = 2**30
"""Memory limit of a template, in bytes."""
View = dict[str, Any]


class Shown(NamedTuple):
    """The abilities of a template."""

    problem: str | None
    """Why it cannot be rendered; None if it can."""
    tools: bool
    """Whether it shows the schemas of tools."""
    results: bool
    """Whether it shows messages of role `tool`."""
    rewrites: str | None
    """The part of a reply that it shows differently after the next user message; None if there is none."""
    hides: list[str]
    """Roles of messages that it leaves out somewhere, or refuses after the first message."""


def shown(source: str, variables: Mapping[str, Any], *, trusted: bool) -> Shown | None:
    """Return what a template does.

    Args:
        source: The template.
        variables: Its variables other than messages and tools.
        trusted: Whether it is rendered in this process.

    Returns:
        The abilities; None if the variables are not JSON.
    """
    try:
        key = json.dumps(variables, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None
    return _shown_of(source, key, trusted)


def rendered(source: str, variables: Mapping[str, Any], messages: Sequence[View], *, trusted: bool) -> str | None:
    """Render a conversation up to the reply; None if the template rejects it.

    Raises:
        ChildError: the template does not end, or takes too much memory.
    """
    text = shown(source, variables, trusted=trusted)
    if text is None or text.problem is not None:
        return None
    if trusted:
        return _render(source, variables, messages)
    return _ask({"source": source, "variables": variables, "messages": messages})["text"]  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _shown_of(source: str, variables: str, trusted: bool) -> Shown:
    if trusted:
        return _shown(source, json.loads(variables))
    try:
        return Shown(*_ask({"source": source, "variables": json.loads(variables)})["shown"])
    except ChildError as error:
        return Shown(str(error), True, True, None, [])


# ---- the child

_children: list[Child] = []
"""The child of this process, if it has one; forked processes start their own."""
os.register_at_fork(after_in_child=_children.clear)
_seconds = [SECONDS]


def set_deadline(seconds: float) -> None:
    """Set the child's deadline for one template, in seconds."""
    _seconds[0] = min(SECONDS, seconds)


def _ask(request: dict[str, Any]) -> Any:
    if not _children:
        _children.append(Child(_answer, memory=MEMORY, group=False))
    try:
        return json.loads(_children[0].ask(json.dumps(request).encode(), _seconds[0]))
    except ChildError:
        _children.clear()
        raise


def _answer(request: bytes, doing: Callable[[str], None]) -> bytes:
    """Answer a request, in the child."""
    asked = json.loads(request)
    if "messages" in asked:
        return json.dumps({"text": _render(asked["source"], asked["variables"], asked["messages"])}).encode()
    return json.dumps({"shown": _shown(asked["source"], asked["variables"])}).encode()


# ---- rendering


def _render(source: str, variables: Mapping[str, Any], messages: Sequence[View]) -> str | None:
    from engine.tokens.jinja_template import JinjaSource

    try:
        return JinjaSource(source, variables).text(messages, None)
    except RenderError:
        return None


def _shown(source: str, variables: Mapping[str, Any]) -> Shown:
    from engine.tokens.jinja_template import JinjaSource
    from engine.tokens.template import abilities_of, hidden_roles, rewritten_part

    try:
        template = JinjaSource(source, variables)
    except RenderError as error:
        return Shown(str(error), True, True, None, [])
    try:
        template.text([{"role": "user", "content": "Q"}], None)
    except RenderError:
        return Shown("it refuses a conversation that a user begins", True, True, None, [])
    abilities = abilities_of(template.text)
    return Shown(
        None, abilities.tools, abilities.tool_results, rewritten_part(template.text), hidden_roles(template.text)
    )
