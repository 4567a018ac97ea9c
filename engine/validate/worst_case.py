"""The worst case: the maximum cost of one episode and of the whole run, and what bounds each.

It is computed from the graph of everything that an episode may do (`explore`), so it holds for every behaviour of the
model and the environments. If that graph is too large, the worst case of a counter is its own limit.

No episode costs more than its worst case. Some path through the machine reaches the worst case of each counter; only
guards on facts, texts or rewards may exclude that path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from engine.actions.action_facts import NO_CALLS
from engine.actions.facts import ACTIONS, seconds_of
from engine.errors import EngineError
from engine.limits import COUNTERS, EPISODE_SECONDS, LIMITS
from engine.schemas.limits import UNBOUNDED
from engine.spec.load import LoadedSpec
from engine.spec.text.diagnostic import DataPath, Diagnostic
from engine.spec.text.near import near_or_known
from engine.validate.context import CheckContext
from engine.validate.explore import TURNS, Graph, Place, explore
from engine.validate.model_files import model_files

COUNTS = tuple(limit.name for limit in COUNTERS)
COSTS = {
    "tokens": "sampled_tokens",
    **{limit.budget: "seconds" if limit is EPISODE_SECONDS else limit.name for limit in LIMITS if limit.budget},
}
"""What adds up over a run: its name in a budget, and in a worst case."""
MACHINE = "machine"
"""What bounds a counter that no limit bounds: the machine's graph."""


class Bound(NamedTuple):
    """An upper bound, and what sets it."""

    most: int | float | None
    """None if there is no bound."""
    by: str
    """A key of the spec, such as `limits.assistant_turns`, or `machine`; for what is not bounded, why."""

    def times(self, factor: int | None) -> Bound:
        """This bound multiplied by a factor."""
        if factor is None and self.most != 0:
            return Bound(None, "the number of tasks is not known")
        return Bound(None if self.most is None else self.most * min(factor or 0, UNBOUNDED), self.by)


@dataclass(frozen=True)
class WorstCase:
    """The maximum cost of a spec."""

    tasks: int | None
    """The number of tasks; None if it is not known."""
    episodes: int | None
    """Tasks times samples."""
    exact: bool
    """Whether the graph is exact; otherwise the worst case of a counter is its own limit."""
    episode: Mapping[str, Bound]
    """Of one episode: the counters, tokens, branches, images, seconds."""
    run: Mapping[str, Bound]
    """Of the whole run: the same, for what adds up."""


def worst_case(ctx: CheckContext) -> WorstCase:
    """Return the worst case of a spec whose machine has no errors."""
    rollout = ctx.spec.rollout
    episode = {name: count_bound(ctx, name) for name in COUNTS}
    turns = sampled = episode[COUNTS[TURNS]]
    if turns.most is not None:
        most, by = ctx.spec.limits.turn_tokens, "limits.turn_tokens"
        if (new := ctx.spec.sampling.max_new_tokens) is not None and new < most:
            most, by = new, "sampling.max_new_tokens"
        sampled = Bound(turns.most * min(most, UNBOUNDED), f"{turns.by} × {by}")
    images = _lowest(
        {"limits.images": ctx.spec.limits.images, "model.max_images": ctx.spec.model.max_images},
        "neither `limits.images` nor `model.max_images` is set",
    )
    if (files := model_files(ctx.loaded)) is not None and files.sees is False:
        images = Bound(0.0, "the model takes only text")
    episode |= {
        "sampled_tokens": sampled,
        "context_tokens": context_bound(ctx),
        "branches": turns,  # at most one new branch per turn
        "images": images,
        "seconds": _seconds(ctx),
    }
    tasks = ctx.task_count()
    episodes = None if tasks is None else tasks * rollout.samples_per_task
    run = {name: episode[name].times(episodes) for name in COSTS.values()}
    waves = None if episodes is None else -(-episodes // (rollout.live_episodes or 2 * rollout.concurrency))
    run["seconds"] = episode["seconds"].times(waves)  # episodes of one wave run at the same time
    return WorstCase(tasks, episodes, ctx.graph.exact, episode, run)


# ---- counts


def most_counts(graph: Graph) -> tuple[float, ...]:
    """Return the maximum of each counter on any path through a graph; infinite if nothing bounds it."""
    if graph.most is None:
        graph.most = tuple(_longest(graph, index) for index in range(len(COUNTERS)))
    return graph.most


def _longest(graph: Graph, index: int) -> float:
    """The maximum of one counter, within its limit."""
    limit = graph.chart.limits[index]
    weight = graph.chart.most_sampled if COUNTERS[index].per_use == "calls" else 1  # a call is at least one token
    if limit is not None and weight == 1:  # such a counter is counted exactly
        return float(max(place.counts[index] for place in graph.steps))
    longest = heaviest(graph, lambda place, used: float(weight) if index in used else 0.0)
    return min(longest, inf if limit is None else float(limit))


def heaviest(graph: Graph, weigh: Callable[[Place, tuple[int, ...]], float]) -> float:
    """Return the weight of the heaviest path through a graph; infinite if a step with a weight lies on a cycle."""
    component, count = graph.components
    best = [0.0] * count
    for place, number in component.items():  # steps lead to places that come before, or of the same number
        for step in graph.steps[place]:
            weight = weigh(place, step.used)
            if component[step.dest] != number:
                best[number] = max(best[number], weight + best[component[step.dest]])
            elif weight > 0:
                best[number] = inf
    return best[component[next(iter(graph.steps))]]


def count_bound(ctx: CheckContext, name: str) -> Bound:
    """Return the maximum of one of `COUNTS` in one episode."""
    graph, index, limit = ctx.graph, COUNTS.index(name), ctx.spec.limits.value_of(name)
    unset = f"`limits.{name}` is not set"
    if not graph.exact:
        if graph.walked and not any(index in step.used for steps in graph.steps.values() for step in steps):
            return Bound(0.0, MACHINE)
        return Bound(None if limit is None else min(limit, UNBOUNDED), f"limits.{name}" if limit is not None else unset)
    most = most_counts(graph)[index]
    if most == inf:
        return Bound(None, unset)
    return Bound(most, _binding(ctx, index, most))


def _binding(ctx: CheckContext, index: int, most: float) -> str:
    """The limit whose increase would increase the counter's maximum."""
    limits = ctx.spec.limits
    for name in sorted(COUNTS, key=lambda name: name != COUNTS[index]):
        if (value := limits.value_of(name)) is None:
            continue
        wider = explore(ctx.chart(limits.with_value(name, value + 1)))
        if most_counts(wider)[index] > most if wider.exact else name == COUNTS[index] and most == value:
            return f"limits.{name}"
    if COUNTERS[index].per_use == "calls" and most:
        return "limits.turn_tokens"  # a call is at least one token
    return MACHINE


# ---- tokens


def _lowest(bounds: Mapping[str, int | None], unset: str) -> Bound:
    """The lowest of some bounds by what sets them; without any, `unset` says why."""
    finite = ((float(min(most, UNBOUNDED)), by) for by, most in bounds.items() if most is not None)
    return Bound(*min(finite, default=(None, unset)))


def context_bound(ctx: CheckContext) -> Bound:
    """Return the maximum length of a sequence, the reply included."""
    limits, model, files = ctx.spec.limits, ctx.spec.model, model_files(ctx.loaded)
    return _lowest(
        {
            "limits.episode_tokens": limits.episode_tokens,
            "model.context": model.context,
            "the model's context": None if files is None or model.context is not None else files.context,
        },
        "neither `limits.episode_tokens` nor `model.context` is set, and the model's files are not on this computer",
    )


# ---- time


def _seconds(ctx: CheckContext) -> Bound:
    """The sum of the deadlines on the longest path, or the episode's time limit and the final state's deadline."""
    graph, limit = ctx.graph, ctx.spec.limits.episode_seconds
    ends = max((seconds_of(ctx.spec, state) for state in ctx.states.values() if state.final), default=0.0)
    longest = inf if limit is None else limit + ends
    way = inf
    if graph.exact:
        worth = {name: seconds_of(ctx.spec, state) for name, state in ctx.states.items() if not state.final}
        calling = {
            name
            for name, state in ctx.states.items()
            if (facts := ACTIONS.get(str(state.action))) and facts.answers_calls
        }
        rest = {
            place
            for place in graph.steps
            if graph.rests(place) or (place.newest == NO_CALLS and place.state in calling)
        }
        way = heaviest(graph, lambda place, used: 0.0 if place in rest else worth.get(place.state, 0.0)) + ends
    if min(longest, way) == inf:
        return Bound(None, "`limits.episode_seconds` is not set, and not everything has a deadline")
    if longest <= way:
        return Bound(longest, "limits.episode_seconds" + (" + the final state's deadline" if ends else ""))
    return Bound(way, "the deadlines of what the episode does")


OVER_BUDGET = "budget.exceeded"


def read_budget(given: Mapping[str, float] | Sequence[str]) -> dict[str, float]:
    """Read `{"tokens": 1e9}` or `["tokens=1e9", "seconds=3600"]`: the maximum by name.

    Raises:
        EngineError: a name does not exist, or a value is not a number (kind `budget_error`).
    """
    budget: dict[str, float] = {}
    for item in given if not isinstance(given, Mapping) else [f"{name}={most}" for name, most in given.items()]:
        name, _, value = item.partition("=")
        name = name.strip()
        if name not in COSTS:
            words = f"there is no budget `{name}`; {near_or_known(name, list(COSTS), what='budgets')}"
            raise EngineError(words, kind="budget_error", blame="spec")
        try:
            most = float(value.replace("_", ""))
        except ValueError:
            most = -1.0
        if not most >= 0:
            words = f"`{item}` is not a valid budget; write `{name}=1e9`"
            raise EngineError(words, kind="budget_error", blame="spec")
        budget[name] = most
    return budget


def over_budget(loaded: LoadedSpec, worst: WorstCase, budget: Mapping[str, float]) -> list[Diagnostic]:
    """Return a finding for each cost that may exceed its budget, at the key that bounds it."""
    diagnostics = []
    for name, most in budget.items():
        bound = worst.run[COSTS[name]]
        if bound.most is not None and bound.most <= most:
            continue
        path = key_of(bound.by, ("limits",))
        if bound.most is None:
            message = f"the run's {name} are not bounded: {bound.by}; the budget is {most:,.0f}"
        else:
            message = f"the run may cost {bound.most:,.0f} {name} ({bound.by}); the budget is {most:,.0f}"
        diagnostics.append(
            Diagnostic(
                OVER_BUDGET,
                "error",
                message,
                "lower the limit, the tasks (`tasks.limit`) or `rollout.samples_per_task`",
                loaded.origin(path),
                path,
            )
        )
    return diagnostics


def key_of(by: str, default: DataPath) -> DataPath:
    """The first key of the spec that the words of a bound name."""
    return next((tuple(word.strip("`").split(".")) for word in by.split() if word.count(".") == 1), default)
