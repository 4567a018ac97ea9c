"""The text of a guard -> a function of documented, typed variables, compiled once and checked before a run.

A guard returns true or false, or raises a `GuardError` that says what to write instead. Evaluation changes nothing, so
many episodes may share a guard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import GuardError
from engine.machine.cost import ASSUMED_SIZES, MAX_WORK, is_looping, sizes_of, work_of
from engine.machine.evaluate import EvaluationError, compile_tree
from engine.machine.expression import ExpressionError, Name, parse
from engine.machine.inference import GuardProblem, TypeInference, describe
from engine.machine.operators import NUMBERS
from engine.machine.variables import BOOL, DYN, STRING, VARIABLES, Variable
from engine.terminal import around, brief

MAX_CHARACTERS = 4_000
"""Characters that an expression may have."""


class Guard:
    """One compiled CEL expression.

    guard = Guard("turns.user < limits.user_turns")
    guard.names                                                             # frozenset({"limits", "turns"})
    guard.evaluate({"turns": {"user": 1}, "limits": {"user_turns": 3}})     # True

    Raises:
        GuardError: the expression is too long, is not valid, or calls a function that does not exist.
    """

    __slots__ = ("_evaluate", "_looping_tree", "expression", "names")

    def __init__(self, expression: str, variables: Mapping[str, Variable] = VARIABLES) -> None:
        self.expression = expression
        if len(expression) > MAX_CHARACTERS:
            raise GuardError(f"a guard has {len(expression)} characters; at most {MAX_CHARACTERS} are allowed")
        try:
            tree = parse(expression)
            self._evaluate = compile_tree(tree, expression)
        except ExpressionError as error:
            fix = f"; {error.fix}" if error.fix else ""
            place = f"guard `{around(expression, error.offset)}`, column {error.offset + 1}"
            raise GuardError(brief(f"{place}: {error}{fix}")) from error
        self.names = frozenset(node.name for node in tree.walk() if isinstance(node, Name)) & frozenset(variables)
        """The variables that it reads."""
        self._looping_tree = tree if is_looping(tree) else None
        """The tree, if the work depends on the sizes of the variables."""

    def evaluate(self, context: Mapping[str, Any]) -> bool:
        """Return whether the guard holds.

        Args:
            context: A mapping for each variable in `names`.

        Raises:
            GuardError: a field is missing, types do not fit, the work exceeds `MAX_WORK`, or the result is not a bool.
        """
        value = self.value(context)
        if value is True or value is False:
            return bool(value)
        raise GuardError(
            f"guard `{around(self.expression, 0)}` returns {brief(repr(value))} instead of true or false; compare it"
        )

    def value(self, context: Mapping[str, Any]) -> Any:
        """Return the expression's value, of any type.

        Raises:
            GuardError: a field is missing, types do not fit, or the work exceeds `MAX_WORK`.
        """
        if self._looping_tree is not None:
            work = work_of(self._looping_tree, sizes_of(context.values()))
            if work > MAX_WORK:
                raise GuardError(
                    f"guard `{around(self.expression, 0)}`: it may take {work:,} steps on these values; {MAX_WORK:,} are allowed. "
                    "Nest fewer loops, or shorten the lists that it loops over"
                )
        try:
            return self._evaluate(context)
        except EvaluationError as error:
            raise GuardError(f"guard `{around(self.expression, 0)}`: {error}") from error
        except RecursionError as error:
            raise GuardError(
                f"guard `{around(self.expression, 0)}`: a value is nested too deeply to be compared"
            ) from error

    def __repr__(self) -> str:
        return f"Guard({self.expression!r})"


def guard_problems(expression: str, variables: Mapping[str, Variable] = VARIABLES) -> list[GuardProblem]:
    """Return everything that is wrong with an expression and can be found without evaluating it, by column.

    Syntax errors; variables, fields and functions that do not exist, with the nearest name that does; types that do not
    fit; a result that is not a bool; loops that may take too long.
    """
    if len(expression) > MAX_CHARACTERS:
        message = f"{len(expression)} characters; at most {MAX_CHARACTERS} are allowed"
        return [GuardProblem(message=message, column=1, fix="write a shorter guard", kind="parse")]
    try:
        tree = parse(expression)
    except ExpressionError as error:
        return [GuardProblem(message=str(error), column=error.offset + 1, fix=error.fix, kind="parse")]
    inference = TypeInference(expression, variables)
    types = inference.types(tree)
    problems = inference.problems
    if types.isdisjoint(BOOL | DYN):
        fix = "compare it" if types <= NUMBERS | STRING else None
        message = f"a guard must be true or false; this is {describe(types)}"
        problems.append(GuardProblem(message=message, column=tree.start + 1, fix=fix, kind="not-boolean"))
    if is_looping(tree) and (work := work_of(tree, ASSUMED_SIZES)) > MAX_WORK:
        steps = f"{work:,}" if work < 10**12 else "more than 10¹²"
        message = f"with lists of {ASSUMED_SIZES.length} elements it may take {steps} steps; {MAX_WORK:,} are allowed"
        fix = "nest fewer loops, or let the environment compute a fact"
        problems.append(GuardProblem(message=message, column=tree.start + 1, fix=fix, kind="too-costly"))
    return sorted(problems, key=lambda problem: problem.column)
