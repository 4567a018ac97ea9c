"""The bound of a guard's work is never below what evaluating it takes, and a guard past the budget is never run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import GuardError
from engine.machine.expression import Comprehension, Constant, Index, ListOf, Name, Node, Operation, Select, parse
from engine.machine.guards import MAX_COUNTED, MAX_WORK, Guard, Sizes, guard_problems, sizes_of, work_of

LISTS: st.SearchStrategy[Any] = st.recursive(
    st.integers(0, 9), lambda inner: st.lists(inner, max_size=4), max_leaves=20
)


class Steps:
    """A plain evaluator of list expressions that counts the nodes it visits and the values it copies."""

    def __init__(self) -> None:
        self.count = 0

    def value(self, node: Node, names: dict[str, Any]) -> Any:
        self.count += 1
        match node:
            case Name(name=name):
                return names[name]
            case Constant(value=value):
                return value
            case Select(of=of, field=field):
                return self.value(of, names)[field]
            case Index(of=of, key=key):
                return self.value(of, names)[self.value(key, names)]
            case ListOf(items=items):
                return self.copied([self.value(item, names) for item in items])
            case Operation(operator="+", args=(left, right)):
                return self.copied(self.value(left, names) + self.value(right, names))
            case Operation(operator="==", args=(left, right)):
                both = self.value(left, names), self.value(right, names)
                self.count += min(_nodes(both[0]), _nodes(both[1]))
                return both[0] == both[1]
            case Comprehension(name=name, over=over, variable=variable, bodies=bodies):
                return self.loop(name, self.value(over, names), variable, bodies[-1], names)
        raise AssertionError(node)

    def copied(self, value: Any) -> Any:
        self.count += _nodes(value)
        return value

    def loop(self, name: str, over: list[Any], variable: str, body: Node, names: dict[str, Any]) -> Any:
        built: list[Any] = []
        for element in over:
            found = self.value(body, {**names, variable: element})
            if name == "map" or (name == "filter" and found):
                built.append(found if name == "map" else element)
        return built if name in ("map", "filter") else True  # the dearest case: a loop that looks at every element


def _nodes(value: Any) -> int:
    return 1 + sum(map(_nodes, value)) if isinstance(value, list) else 1


@st.composite
def expressions(draw: st.DrawFn, names: tuple[str, ...] = ("facts.l",), depth: int = 3) -> str:
    """A list, made of the list `facts.l` and of loops' variables."""
    kind = draw(st.sampled_from(["name", "name", "join", "list", "map", "filter", "all"] if depth else ["name"]))
    part = expressions(names=names, depth=depth - 1) if depth else None
    if kind == "name" or part is None:
        return draw(st.sampled_from(names))
    if kind == "join":
        return f"({draw(part)} + {draw(part)})"
    if kind == "list":
        return f"[{draw(part)}, {draw(part)}]"
    variable = f"v{depth}"
    inner = draw(expressions(names=(*names, variable), depth=depth - 1))
    over = draw(part)
    if kind == "map":
        return f"{over}.map({variable}, {inner})"
    if kind == "filter":
        return f"{over}.filter({variable}, {inner} == {inner})"
    return f"[{over}.all({variable}, {inner} == {inner})]"


@given(expressions(), LISTS.filter(lambda value: isinstance(value, list)))
def test_no_evaluation_takes_more_than_the_bound(expression: str, value: list[Any]) -> None:
    steps = Steps()
    tree = parse(expression)
    try:
        steps.value(tree, {"facts": {"l": value}})
    except TypeError:
        return  # a number where a list belongs: CEL ends there as well
    assert steps.count <= work_of(tree, sizes_of([{"l": value}]))


NESTED = ["facts.l.all(a, " * depth + "true" + ")" * depth for depth in range(4, 12)]
COSTLY = [
    *NESTED,
    *(text.replace(".all(", f".{name}(") for text in NESTED[:2] for name in ("exists_one", "filter", "map")),
    "facts.l.map(x, facts.l.map(y, facts.l + facts.l)).size() > 1",
    "facts.l.map(x, facts.l).map(x, x + x).map(x, x + x).map(x, [x, x, x]).all(x, x.all(y, y.all(z, true)))",
    "[1, 2, 3, 4, 5, 6].all(a, " * 8 + "true" + ")" * 8,
]


@pytest.mark.parametrize("expression", COSTLY)
def test_a_guard_past_the_budget_is_refused_before_the_run_and_not_evaluated_in_it(expression: str) -> None:
    problems = guard_problems(expression)
    assert "too-costly" in {problem.kind for problem in problems}
    with pytest.raises(GuardError, match="steps on these values; 1,000,000 are allowed") as raised:
        Guard(expression).value({"facts": {"l": list(range(1000))}})
    assert raised.value.blame == "spec"


@pytest.mark.parametrize(
    "expression", ["facts.l.all(a, facts.l.all(b, a <= b || b <= a))", "facts.l.exists(a, a == 3)"]
)
def test_what_short_lists_allow_is_refused_on_long_ones_alone(expression: str) -> None:
    assert guard_problems(expression) == []
    guard = Guard(expression)
    assert guard.evaluate({"facts": {"l": list(range(64))}}) is True
    with pytest.raises(GuardError, match="allowed"):
        guard.evaluate({"facts": {"l": list(range(MAX_COUNTED))}})


def test_a_guard_without_a_loop_has_no_bound_to_compute() -> None:
    guard = Guard("size(facts.l) > 3 && facts.l[0] == 0 && 7 in facts.l")
    assert guard.evaluate({"facts": {"l": list(range(MAX_COUNTED))}}) is True


def test_sizes_are_of_the_largest_at_any_depth() -> None:
    assert sizes_of([{"a": [1, [2, 3, 4]], "b": "four"}, "eleven char"]) == Sizes(length=3, nodes=10, characters=11)
    assert sizes_of([]) == Sizes(length=0, nodes=0, characters=0)
    assert work_of(parse("facts.l.all(x, true)"), sizes_of([[0] * (MAX_COUNTED + 1)])) > MAX_WORK
