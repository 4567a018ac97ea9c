"""Checking specs, each within a time limit.

Specs are checked in a child process: if one takes too long or crashes a parser, only its own result is lost. No code
that a spec names is imported there. With `--import` a second child process for each spec imports the code; it cannot
remove findings of the first one.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.errors import SpecError
from engine.moved_names import MovedNameWarning
from engine.plugin import Hook, missing
from engine.processes.forked import Child, ChildError, refuse_outside
from engine.schemas.sections import written
from engine.spec.access import Access
from engine.spec.load import UNREADABLE, LoadedSpec, read_spec
from engine.spec.references import mask, mask_all
from engine.spec.resolve import MAX_BYTES
from engine.spec.text.diagnostic import Diagnostic, Origin
from engine.terminal import one_line
from engine.validate.check import all_rules, check_rules, trainer_of
from engine.validate.context import CheckContext
from engine.validate.report import Report, excerpts_of, pack, unpack
from engine.validate.templates import set_deadline
from engine.validate.worst_case import over_budget, worst_case

_REPLIES = re.compile(r"^(?:(?:replies|cases)[ \t]*:|- )", re.MULTILINE)
_SPEC_KEY = re.compile(r"^(?:spec|extends)[ \t]*:", re.MULTILINE)
_SPEC = re.compile(r"^(?:spec|extends|model|tasks|machine)[ \t]*:", re.MULTILINE)
"""Keys of a spec at the top level; one without `spec` is still meant as one."""
SECONDS = 60.0
"""Time limit for one spec, in seconds."""
MEMORY = 4 * 2**30
"""Memory limit for checking a spec, in bytes."""
CODE_MEMORY = 8 * 2**30
"""Memory limit for importing the code of a spec, in bytes."""
STOPPED = "check.stopped"
"""The id of the finding that a spec was not checked completely."""
FAILED = "check.import-failed"
"""The id of the finding that the rules that import code have no result."""
NO_PLUGIN = "scenario.no-plugin"
"""The id of the finding that a file of scenarios is not checked."""
SCENARIOS = ".scenarios"
"""What the name of a file of scenarios ends with, before `.yaml`."""
EXAMINE_FILE: Hook[Callable[[Path, Sequence[str], Access], tuple[list[Diagnostic], bool, list[str]] | None]]
EXAMINE_FILE = Hook("examine_file")
"""Findings in a file that is not a spec, whether it could not be read, and the rules that were skipped; None if it is
not the plugin's.

The arguments are the file, the overrides of `--set`, and the files that may be opened. Nothing is run.
"""
SLOW_FINDINGS: Hook[Callable[[LoadedSpec, float], Iterable[Diagnostic]]] = Hook("slow_findings")
"""Findings in a spec that import torch or another library, in at most so many seconds."""


@dataclass(frozen=True)
class Options:
    """The options of `engine validate`."""

    overrides: Sequence[str] = ()
    """Overrides, as for `--set`."""
    cost: bool = False
    """Compute the worst case."""
    budget: Mapping[str, float] = field(default_factory=dict)
    """The budget of the run; see `engine.validate.worst_case`."""
    imports: bool = False
    """Whether to import the code that specs name, and to build its objects once."""
    apart: bool = False
    """Whether to import no code that runs only in worker processes."""
    allowed: Sequence[Path] = ()
    """Additional folders whose files may be opened."""
    seconds: float = SECONDS
    """Time limit for one spec, in seconds."""
    trainer: str | None = None
    """The trainer that is to train on the spec's episodes."""


def find_specs(named: Sequence[Path], allowed: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield the files to validate, each once: for a folder, all specs below it.

    In a folder, a YAML file is a spec if it has the key `spec` or `extends` at the top level; scripts and scenarios
    have neither.

    Args:
        named: Files and folders.
        allowed: Folders to which links in these may lead.
    """
    seen: set[Path] = set()
    for path in named:
        for file in _under(path, allowed) if path.is_dir() else [path]:
            if file.absolute() not in seen:
                seen.add(file.absolute())
                yield file


def _under(folder: Path, allowed: Sequence[Path]) -> Iterator[Path]:
    for file in sorted((*folder.rglob("*.yaml"), *folder.rglob("*.yml"))):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts):
            text = _text(file, Access.for_spec(file, allowed))
            if text is None or _SPEC_KEY.search(text):
                yield file


def _text(file: Path, access: Access) -> str | None:
    """The text of a file; None if it cannot be read: reading it as a spec reports the reason."""
    try:
        data = access.read(file, MAX_BYTES)
    except (OSError, ValueError):
        return None
    return None if data is None else data.decode("utf-8-sig", "replace")


def examine(
    path: Path,
    options: Options | None = None,
    doing: Callable[[str], None] | None = None,
    *,
    access: Access | None = None,
) -> Report:
    """Read one spec and apply all rules to it, in this process; a file of scenarios is compared with its spec.

    With `options.imports` the code that the spec names is imported in this process.

    Args:
        path: The spec.
        options: The options.
        doing: Called with the next activity.
        access: What may be opened and imported; by default as the options say.
    """
    options = options or Options()
    access = access or Access.for_spec(path, options.allowed, imports=options.imports)
    set_deadline(options.seconds / 2)
    for examine_file in EXAMINE_FILE.all():
        if (other := examine_file(path, options.overrides, access)) is not None:
            diagnostics, unreadable, skipped = other
            return _report(Report(str(path), diagnostics, unreadable, kind="scenarios", skipped=skipped), {}, access)
    if path.stem.endswith(SCENARIOS) and (unplayed := list(_unplayed(path))):
        return Report(str(path), unplayed, kind="scenarios")
    text = (_text(path, access) if path.is_file() else None) or ""
    if _REPLIES.search(text) and not _SPEC.search(text):  # a list, or a mapping with a key that only replies have
        from engine.backends.scripted import read_script

        try:
            read_script(path, access)
        except SpecError as error:
            return _report(Report(str(path), list(error.diagnostics), kind="replies"), {}, access)
        return Report(str(path), [], kind="replies")
    loaded, problems = read_spec(path, options.overrides, access)
    if loaded is None:
        report = Report(str(path), problems, unreadable=any(item.rule in UNREADABLE for item in problems))
        return _report(report, {}, access)
    report = examine_spec(loaded, options, doing)
    sources = {mask(file, loaded.variables): text for file, text in loaded.sources.items()}
    report = replace(report, file=str(path), diagnostics=[*problems, *report.diagnostics, *_unplayed(path)])
    return _report(report, sources, access)


def examine_spec(loaded: LoadedSpec, options: Options, doing: Callable[[str], None] | None = None) -> Report:
    """Apply all rules to a spec that is read, and what they leave to others: the worst case, a budget, a trainer,
    findings that import a library."""
    findings, skipped = check_rules(loaded, doing, apart=options.apart, calls=options.imports)
    worst = None
    sound = not any(item.severity == "error" and item.rule.startswith("machine.") for item in findings)
    if (options.cost or options.budget) and sound:
        worst = worst_case(CheckContext(loaded))
        findings += mask_all(over_budget(loaded, worst, options.budget), loaded.variables)
    if options.trainer is not None and sound:
        findings += mask_all(trainer_of(options.trainer).findings(loaded), loaded.variables)
    for slow_findings in SLOW_FINDINGS.all(written(loaded.spec)):
        findings += mask_all(slow_findings(loaded, options.seconds / 2), loaded.variables)
    return Report(str(loaded.path), findings, worst=worst, skipped=skipped)


def _unplayed(path: Path) -> Iterator[Diagnostic]:
    """Yield the finding that scenarios are not checked, because their plugin is not installed: of a spec's, or of this
    file's."""
    named = path.stem.endswith(SCENARIOS)
    beside = [path.with_name(f"{path.stem}{SCENARIOS}{ending}") for ending in (".yaml", ".yml")]
    file = path if named else next((file for file in beside if file.is_file()), None)
    if file is not None and (why := missing("commands", "test")):
        yield Diagnostic(
            NO_PLUGIN,
            "error" if named else "info",
            f"the scenarios in {file.name} are not checked",
            why,
            Origin(str(path), 1, 1),
        )


def _report(report: Report, sources: Mapping[str, str], access: Access) -> Report:
    return replace(report, excerpts=excerpts_of(report.diagnostics, sources, access))


def examine_all(paths: Sequence[Path], options: Options) -> tuple[list[Report], list[str]]:
    """Check specs in child processes.

    Returns:
        The reports, and the lines that imported code and parsers printed, with their origin.
    """
    all_rules()  # imported once, before the children are forked
    examiner = _Examiner(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MovedNameWarning)  # a finding names them, with their place
        try:
            reports = [examiner.examine(path) for path in paths]
        finally:
            examiner.close()
    return reports, examiner.printed


@dataclass
class _Examiner:
    """Checks one spec after another; a child is reused until it ends."""

    options: Options
    printed: list[str] = field(default_factory=list)
    _child: Child | None = None

    def examine(self, path: Path) -> Report:
        """Check one spec."""
        ends = time.monotonic() + self.options.seconds
        request = str(path).encode("utf-8", "surrogateescape")
        if self._child is None:
            self._child = _child(replace(self.options, imports=False), MEMORY)
        try:
            static = unpack(str(path), self._child.ask(request, self.options.seconds))
        except ChildError as error:
            self.close()
            return _failed(
                path, STOPPED, f"this spec could not be checked completely: {error}", "make it smaller or simpler"
            )
        if not self.options.imports or static.unreadable or any(item.rule == STOPPED for item in static.diagnostics):
            return static
        child = _child(self.options, CODE_MEMORY)
        try:
            imported = unpack(str(path), child.ask(request, max(ends - time.monotonic(), 0.1)))
            seen = {(item.rule, item.origin, item.path) for item in imported.diagnostics}
            extra = [
                (item, excerpt)
                for item, excerpt in zip(static.diagnostics, static.excerpts, strict=True)
                if item.severity == "error"
                and (item.rule, item.origin, item.path) not in seen
                and item.rule != "budget.exceeded"
            ]
            pairs = [*zip(imported.diagnostics, imported.excerpts, strict=True), *extra]
            pairs.sort(key=lambda pair: pair[0].place)
            return replace(imported, diagnostics=[item for item, _ in pairs], excerpts=[shown for _, shown in pairs])
        except (ChildError, ValueError) as error:
            failed = _failed(
                path,
                FAILED,
                f"the checks that import its code have no result: {error}",
                "a module must be imported without ending the process, and within the time and memory limits",
            )
            return replace(
                static,
                diagnostics=[*static.diagnostics, *failed.diagnostics],
                excerpts=[*static.excerpts, *failed.excerpts],
            )
        finally:
            self._end(child, "imported code")

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._end(self._child, "while checking")
            self._child = None

    def _end(self, child: Child, who: str) -> None:
        child.close()
        self.printed += [f"{who}: {one_line(line)}" for line in child.printed.decode("utf-8", "replace").splitlines()]


def _child(options: Options, memory: int) -> Child:
    def answer(request: bytes, doing: Callable[[str], None]) -> bytes:
        if not options.imports:
            refuse_outside()
        path = Path(request.decode("utf-8", "surrogateescape"))
        try:
            return pack(examine(path, options, lambda rule: doing(f"at the rule `{rule}`")))
        except MemoryError:
            return pack(_failed(path, STOPPED, "this spec needs more memory than is available", "make it smaller"))
        except RecursionError:
            return pack(_failed(path, STOPPED, "something in this spec is nested too deep", "flatten it"))

    return Child(answer, memory=memory, capture=True)


def _failed(path: Path, rule: str, message: str, fix: str) -> Report:
    return Report(str(path), [Diagnostic(rule, "error", message, fix, Origin(str(path), 1, 1))], excerpts=[None])
