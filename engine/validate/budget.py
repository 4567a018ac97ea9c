"""The budget of a run, compared with its worst case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from engine.errors import EngineError
from engine.spec.load import LoadedSpec
from engine.spec.text.diagnostic import DataPath, Diagnostic
from engine.validate.worst_case import COSTS, WorstCase

RULE = "budget.exceeded"


class BudgetError(EngineError):
    """A budget that is not valid."""

    kind = "budget_error"
    blame = "spec"


def read_budget(given: Sequence[str]) -> dict[str, float]:
    """Read `["tokens=1e9", "seconds=3600"]`: the maximum by name.

    Raises:
        BudgetError: a name does not exist, or a value is not a number.
    """
    found: dict[str, float] = {}
    for item in given:
        name, _, value = item.partition("=")
        name = name.strip()
        if name not in COSTS:
            near = get_close_matches(name, COSTS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"the budgets are {', '.join(COSTS)}"
            raise BudgetError(f"there is no budget `{name}`; {hint}")
        try:
            most = float(value.replace("_", ""))
        except ValueError:
            most = -1.0
        if not most >= 0:
            raise BudgetError(f"`{item}` is not a valid budget; write `{name}=1e9`")
        found[name] = most
    return found


def over_budget(loaded: LoadedSpec, worst: WorstCase, budget: Mapping[str, float]) -> list[Diagnostic]:
    """Return a finding for each cost that may exceed its budget, at the key that bounds it."""
    found = []
    for name, most in budget.items():
        bound = worst.run[COSTS[name]]
        if bound.most is not None and bound.most <= most:
            continue
        path = _path(bound.by)
        if bound.most is None:
            message = f"the run's {name} are not bounded: {bound.by}; the budget is {most:,.0f}"
        else:
            message = f"the run may cost {bound.most:,.0f} {name} ({bound.by}); the budget is {most:,.0f}"
        fix = "lower the limit, the tasks (`tasks.limit`) or `rollout.samples_per_task`"
        found.append(Diagnostic(RULE, "error", message, fix, loaded.origin(path), path))
    return found


def _path(by: str) -> DataPath:
    """The first key that a bound names; `limits` if it names none."""
    words = [word.strip("`") for word in by.split()]
    return next((tuple(word.split(".")) for word in words if word.count(".") == 1), ("limits",))
