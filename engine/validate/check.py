"""Applying all rules to a spec; the findings of other trainers, which plugins add (`engine validate --trainer`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from engine import plugin
from engine.errors import EngineError, SpecError
from engine.schemas.sections import used_plugins
from engine.spec.references import mask_all
from engine.spec.text.diagnostic import Diagnostic
from engine.spec.text.near import near_or_known
from engine.validate.context import MAX_WORK, CheckContext
from engine.validate.registry import PLUGIN_OF, RULES, Rule, import_plugin_rules
from engine.validate.work import Work, WorkLimitError

if TYPE_CHECKING:
    from engine.schemas.environment import Task
    from engine.spec.load import LoadedSpec

MAX_FINDINGS = 100
"""Findings of one rule that are reported."""
FIRST_TASKS = 8
"""Number of tasks that `refuse_first_tasks` reads."""
FIELD_RULES = ("prompt.unknown-field", "role.unknown-field")
"""The rules that `refuse_first_tasks` applies; the second is there with the plugin `roles`."""
MORE = "check.more"
"""The id of the finding that reports that a rule has more findings."""
BROKEN = "check.plugin"
"""The id of the finding that reports that a plugin cannot be used."""
REPAIR = "repair or uninstall it"
CAUSES = (
    *("machine.unknown-state", "machine.unknown-event", "machine.unknown-action", "machine.no-action"),
    *("code.import", "code.action"),
)
"""Names that do not exist, or are missing: what they stand for is missing elsewhere."""
CONSEQUENCES = {
    **dict.fromkeys(
        (
            *("machine.unreachable", "machine.done-unreachable", "machine.unhandled-event", "machine.no-default"),
            *("machine.unbounded-cycle", "machine.cycle-by-time", "machine.user-after-user"),
            *("tools.not-called", "limits.never-binds", "rewards.nothing-to-move"),
        ),
        CAUSES,
    ),
    **dict.fromkeys(("rewards.turn-may-miss", "rewards.no-such-turn"), ("guard.parse", "guard.unknown-name", *CAUSES)),
    **dict.fromkeys(("guard.unknown-fact", "guard.fact-may-miss", "rewards.unknown-name"), ("code.import",)),
}
"""Findings that a fix of one of these causes may remove."""
UNFINISHED = "check.unfinished"
"""The id of the finding that reports that rules stopped early."""


def all_rules() -> list[Rule]:
    """Return every rule, in the order in which they are applied."""
    from engine.validate import (  # noqa: F401  (importing them registers their rules)
        backend,
        guards,
        limits,
        machine,
        model,
        prompts,
        rewards,
        tasks,
        tools,
        train,
    )
    from engine.validate.code import spec_code, with_types  # noqa: F401

    import_plugin_rules()
    return list(RULES.values())


def check_spec(loaded: LoadedSpec) -> list[Diagnostic]:
    """Return all findings of the rules in a spec, in the order of the document; errors before warnings at one position.

    The code that a spec names is imported, unless the spec was read with an `Access` that forbids it, or the code runs
    only in worker processes.
    """
    return check_rules(loaded, apart=True)[0]


def check_rules(
    loaded: LoadedSpec, doing: Callable[[str], None] | None = None, *, apart: bool = False, calls: bool = False
) -> tuple[list[Diagnostic], list[str]]:
    """Return the same, and the ids of the rules that skipped something because code may not be imported.

    Args:
        loaded: The spec.
        doing: Called with the id of each rule before it is applied.
        apart: Import no code that runs only in worker processes.
        calls: Build the objects of the spec once, and make the first rows of a function.
    """
    ctx = CheckContext(loaded, Work(), apart=apart, calls=calls)
    diagnostics: list[Diagnostic] = []
    unfinished: list[str] = []
    used = used_plugins(loaded.spec)
    rules = all_rules()
    plugin.leave_out_unusable(used)
    if refused := _broken_plugins(ctx, used):
        return refused, []
    for item in rules:
        ctx.work.left = MAX_WORK
        ctx.rule = item.id
        if doing is not None:
            doing(item.id)
        of_rule: list[Diagnostic] = []
        try:
            for problem in item.check(ctx):
                of_rule.append(problem)
                if len(of_rule) == MAX_FINDINGS:
                    of_rule.append(
                        Diagnostic(
                            MORE,
                            "info",
                            f"`{item.id}` has more than {MAX_FINDINGS} findings; the others are not reported",
                            "fix these first",
                            ctx.loaded.origin(()),
                        )
                    )
                    break
        except WorkLimitError:
            unfinished.append(item.id)
        except Exception as error:
            if item.id not in PLUGIN_OF:
                raise
            plugin.installed().leave_out(PLUGIN_OF[item.id].name, error)
        diagnostics += of_rule
    if unfinished:
        names = ", ".join(f"`{id}`" for id in unfinished)
        diagnostics.append(
            Diagnostic(
                UNFINISHED,
                "warning",
                f"the spec is too large for these rules to check all of it: {names}",
                "they may miss something: use fewer states, transitions, rules or rows, or simpler conditions",
                ctx.loaded.origin(("machine",), key=True),
            )
        )
    diagnostics += _broken_plugins(ctx)
    return causes_first(mask_all(dict.fromkeys(diagnostics), loaded.variables)), list(ctx.skipped)


def causes_first(diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Sort findings by their place, but one that another may have caused comes after that one."""
    ordered = sorted(diagnostics, key=lambda item: item.place)
    last = {item.rule: index for index, item in enumerate(ordered)}

    def place(index: int) -> tuple[int, bool]:
        after = max((last[cause] for cause in CONSEQUENCES.get(ordered[index].rule, ()) if cause in last), default=-1)
        return max(index, after), after > index

    return [ordered[index] for index in sorted(range(len(ordered)), key=place)]


def refuse_errors(loaded: LoadedSpec) -> list[Diagnostic]:
    """Check a spec before it is used. Returns the warnings.

    Raises:
        SpecError: a rule found an error; it carries all errors.
    """
    diagnostics = check_spec(loaded)
    errors = [item for item in diagnostics if item.severity == "error"]
    if errors:
        raise SpecError(errors)
    return [item for item in diagnostics if item.severity == "warning"]


def refuse_first_tasks(loaded: LoadedSpec, tasks: Sequence[Task]) -> None:
    """Check that prompts name fields of the first tasks, before the first episode.

    For rows that code makes, and for those of a hub, `check_spec` cannot do this: they are read only once, when they
    are needed.

    Raises:
        SpecError: a prompt names a field that one of them does not have.
    """
    if not loaded.spec.tasks.facts.outside:
        return
    all_rules()
    ctx = CheckContext(loaded, read_tasks=list(tasks[:FIRST_TASKS]))
    diagnostics = [item for id in FIELD_RULES if id in RULES for item in RULES[id].check(ctx)]
    if diagnostics:
        raise SpecError(mask_all(diagnostics, loaded.variables))


def _broken_plugins(ctx: CheckContext, used: Collection[str] | None = None) -> list[Diagnostic]:
    """A plugin that cannot be used adds nothing. A spec that uses one of `used` is refused; others may do without."""
    return [
        Diagnostic(
            BROKEN,
            "warning" if used is None else "error",
            f"the plugin `{name}` cannot be used: {why}",
            REPAIR if "(" in name else f"{REPAIR}, or leave it out: {plugin.OFF}={name}",  # another one has its name
            ctx.loaded.origin(()),
        )
        for name, why in plugin.installed().broken.items()
        if used is None or name in used
    ]


class TrainerFacts(Protocol):
    """What an entry of the point `trainers` names."""

    def findings(self, loaded: LoadedSpec) -> list[Diagnostic]:
        """Return a finding for each thing that the spec uses and the trainer does not carry exactly."""


class TrainerError(EngineError):
    """A trainer that does not exist."""

    kind = "trainer_error"
    blame = "spec"


def trainer_of(name: str) -> TrainerFacts:
    """Return a trainer by its name.

    Raises:
        TrainerError: there is no such trainer, or its plugin is not installed.
    """
    trainers: dict[str, TrainerFacts] = plugin.loaded("trainers")
    if name not in trainers:
        hint = plugin.missing("trainers", name) or near_or_known(name, list(trainers))
        raise TrainerError(f"there is no trainer `{name}`; {hint}")
    return trainers[name]
