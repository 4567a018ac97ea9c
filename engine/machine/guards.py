"""Guards: CEL expressions over a documented, typed context, compiled once and checked before anything runs.

Invariant: a guard answers true or false, or raises a `GuardError` that says what to write instead. It changes
nothing, and many episodes may ask the same guard at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import GuardError
from engine.machine.celext import cel_module
from engine.machine.cost import ASSUMED, MOST_WORK, is_looping, sizes_of, work_of
from engine.machine.explain import explain
from engine.machine.expression import MACROS, ExpressionError, Node, parse
from engine.machine.inference import NUMBERS, Finding, Inference, Kind, describe
from engine.machine.variables import BOOL, DYN, STRING, VARIABLES, Member, Variable

cel = cel_module()

LONGEST = 4_000
"""Characters that an expression may have."""


_LOOP = re.compile(rf"\.\s*(?:{'|'.join(MACROS)})\s*\(")
"""What every expression holds that goes through a list or a map."""


@dataclass(frozen=True, slots=True)
class GuardProblem:
    """One thing that is wrong with an expression, found without running it."""

    message: str
    column: int
    """From 1, in the expression."""
    fix: str | None = None
    kind: Kind = "parse"


class Guard:
    """One CEL expression, compiled.

    guard = Guard("turns.user < limits.user_turns")
    guard.names                                                             # frozenset({"limits", "turns"})
    guard.evaluate({"turns": {"user": 1}, "limits": {"user_turns": 3}})     # True

    Raises:
        GuardError: the expression is not CEL, or nested too deeply.
    """

    __slots__ = ("_loops", "_program", "expression", "names")

    def __init__(self, expression: str) -> None:
        self.expression = expression
        if len(expression) > LONGEST:
            raise GuardError(f"a guard of {len(expression)} characters; {LONGEST} are the most")
        try:
            self._program = cel.compile(expression)
            found = self._program.references()["variables"]
        except ValueError as error:
            raise GuardError(f"guard `{expression}`: {error}") from error
        self.names = frozenset(found) & frozenset(VARIABLES)
        self._loops = _looping(expression)
        """The tree of an expression whose work depends on its variables; None for any other."""

    def evaluate(self, context: Mapping[str, Any]) -> bool:
        """Whether it holds.

        Args:
            context: A map for each of `names`.

        Raises:
            GuardError: it asks for what is not there, mixes types, or answers neither true nor false.
        """
        answer = self.value(context)
        if answer is True or answer is False:
            return bool(answer)
        raise GuardError(f"guard `{self.expression}` answers {answer!r}, which is neither true nor false; compare it")

    def value(self, context: Mapping[str, Any]) -> Any:
        """What it comes to, of whatever type.

        Raises:
            GuardError: it asks for what is not there, mixes types, or may take more than `MOST_WORK`.
        """
        if self._loops is not None:
            work = work_of(self._loops, sizes_of(context.values()))
            if work > MOST_WORK:
                raise GuardError(
                    f"guard `{self.expression}`: it may take {work:,} steps on these values; {MOST_WORK:,} are allowed. "
                    "Nest fewer loops, or keep the lists that it goes through shorter"
                )
        try:
            return self._program.execute(context)
        except Exception as error:  # whatever CEL raises is the expression's fault
            raise GuardError(self._explain(error, context)) from error

    def _explain(self, error: Exception, context: Mapping[str, Any]) -> str:
        return f"guard `{self.expression}`: {explain(self.expression, error, context)}"

    def __repr__(self) -> str:
        return f"Guard({self.expression!r})"


def _looping(expression: str) -> Node | None:
    if _LOOP.search(expression) is None:
        return None
    try:
        tree = parse(expression)
    except ExpressionError as error:
        raise GuardError(f"guard `{expression}`: guards cannot use this: {error}") from error
    return tree if is_looping(tree) else None


def guard_problems(expression: str) -> list[GuardProblem]:
    """Everything that can be found wrong with an expression without running it, in the order of its columns.

    It is not CEL; a variable, a field or a function is not there (the nearest that is, is named); types do not fit;
    the answer is no boolean.
    """
    if len(expression) > LONGEST:
        return [GuardProblem(f"{len(expression)} characters; {LONGEST} are the most", 1, "say less in one guard")]
    try:
        cel.compile(expression)
    except ValueError as error:
        return [_parse_problem(expression, str(error))]
    try:
        tree = parse(expression)
    except ExpressionError as error:
        return [GuardProblem(f"guards cannot use this: {error}", error.offset + 1)]
    inference = Inference(expression)
    types = inference.types(tree)
    findings = inference.findings
    if types.isdisjoint(BOOL | DYN):
        fix = "compare it" if types <= NUMBERS | STRING else None
        findings.append(Finding(f"a guard is true or false; this is {describe(types)}", tree.start, fix, "not-boolean"))
    if is_looping(tree) and (work := work_of(tree, ASSUMED)) > MOST_WORK:
        message = (
            f"with lists of {ASSUMED.length} elements it may take {work:,} steps; {MOST_WORK:,} are allowed"
            if work < 10**12
            else f"with lists of {ASSUMED.length} elements it may never end; {MOST_WORK:,} steps are allowed"
        )
        findings.append(Finding(message, tree.start, "nest fewer loops, or let the world tell the fact", "too-costly"))
    return [GuardProblem(f.message, f.offset + 1, f.fix, f.kind) for f in sorted(findings, key=lambda f: f.offset)]


_PARSE_ERROR = re.compile(r"ERROR: <input>:(\d+):(\d+): (?:Syntax error: )?(.*)")
_WORDS = {"and": "&&", "or": "||", "not": "!", "=": "==", "&": "&&", "|": "||", "is": "=="}


def _parse_problem(expression: str, error: str) -> GuardProblem:
    """The library's first complaint, with its column counted through the whole expression and its list of tokens cut."""
    match = _PARSE_ERROR.search(error)
    if match is None:
        return GuardProblem(error, 1)
    lines = expression.split("\n")
    before = sum(len(line) + 1 for line in lines[: int(match[1]) - 1])
    column = before + int(match[2])
    complaint = match[3].split(" expecting ")[0]
    found = re.search(r"'(.+)'$", complaint)
    word = found[1].strip() if found else ""
    if re.search(r"\bnot\s*$", expression[: column - 1]):
        word = "not"
    if not expression.strip():
        return GuardProblem("the expression is empty", 1, "leave `conditions` out where it always holds")
    if word == "<EOF>":
        return GuardProblem("the expression ends too early", column)
    fix = f"CEL writes `{_WORDS[word]}`" if word in _WORDS else None
    return GuardProblem(f"this is not CEL: {complaint}", column, fix)


__all__ = ["LONGEST", "VARIABLES", "Guard", "GuardProblem", "Member", "Variable", "guard_problems"]
