"""Makes a scenario of a finished episode: its replies as they were sampled, and the result that it had.

    text = recorded_scenario(store, "17/0", formats, folder=Path("tests")).text
    add_scenario(store, "17/0", formats, Path("tests/regressions.yaml"))

Replies are scripted. Everything else runs for real where that gives the recorded answer again: users, tools and
environments that are not `external`. Answers of external code, of models that play a role, and the time at which an
episode ran out of it, are scripted with what the journal holds. If code that runs for real answers otherwise, all its
answers are scripted, and a note says so.

Invariant: a scenario that is given out was played, and its result was the recorded one.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from engine.api.exports import RecordedScenario
from engine.errors import SpecError, StoreError
from engine.plugins.scenarios.from_journal import ScriptWriter, expected_of, task_of_scenario, with_texts
from engine.plugins.scenarios.load import ENDINGS, SUFFIX, load_scenarios, spec_of
from engine.plugins.scenarios.suite import Formats, run_suite
from engine.spec.load import load_spec
from engine.store.private import whole_file

if TYPE_CHECKING:
    from engine.store.reader import RunReader

_ELSEWHERE = tuple(
    f"{key}{end}"
    for key in (
        "backend",
        "rollout.concurrency",
        "rollout.live_episodes",
        "rollout.drivers",
        "rollout.shards",
        "rollout.out",
        "rollout.samples_per_task",
        "rollout.max_cost",
        "train",
        "notify",
        "traces",
    )
    for end in ".="
)
"""How overrides begin that change nothing of a scenario."""
_BREAKS = re.compile("[\r\x85\u2028\u2029]")
"""Line breaks that a block of YAML would change."""


def record_scenario(store: RunReader, episode_id: str, path: Path | None) -> RecordedScenario:
    """Make a scenario of a finished episode and play it; with a path, add it to that file. For errors see the two
    functions."""
    formats = Formats()
    if path is None:
        return recorded_scenario(store, episode_id, formats)
    return add_scenario(store, episode_id, formats, path)


def recorded_scenario(
    store: RunReader, episode_id: str, formats: Formats, *, folder: Path | None = None
) -> RecordedScenario:
    """Make a scenario of a finished episode and play it. Runs an event loop of its own: call it in a thread where one
    runs.

    Args:
        store: The run.
        episode_id: The episode.
        formats: Chat formats.
        folder: Where the file will lie; by default beside the spec. The path of the spec in it is relative to this
            folder.

    Raises:
        StoreError: the run has no such finished episode, or the scenario does not have the recorded result.
        SpecError: the spec's file cannot be read any more.
    """
    spec = spec_file(store)
    folder = (folder or spec.parent).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    faults = ""
    for everything in (False, True):
        scenario, notes = _written(store, episode_id, formats, spec, folder, everything=everything)
        if everything:
            notes.append(
                f"all answers of the spec's code are scripted: played for real, the result is another one\n{faults}"
            )
        text = as_yaml({"scenarios_of": os.path.relpath(spec, folder), "scenarios": [scenario]})
        faults = _played(spec, text, folder, formats)
        if not faults:
            return RecordedScenario(scenario["name"], text, notes)
    raise StoreError(
        f"{episode_id}: played as a scenario of {spec}, it has another result than the recorded one; nothing is "
        f"written. Have the spec, its code or the tokenizer changed since the run?\n{faults}"
    )


def add_scenario(store: RunReader, episode_id: str, formats: Formats, path: Path) -> RecordedScenario:
    """Make a scenario of a finished episode and write it to a file; a file of scenarios of the same spec gets one more.

    Raises:
        StoreError: as for `recorded_scenario`; or the file exists and is another one. Then it is left as it is.
        SpecError: the spec's file, or the file of scenarios, cannot be read.
    """
    if path.suffix not in ENDINGS:
        raise StoreError(
            f"a file of scenarios is YAML: name it {path.with_suffix('.yaml').name} instead of {path.name}"
        )
    scenario = recorded_scenario(store, episode_id, formats, folder=path.parent)
    if path.stem.endswith(SUFFIX) and not path.exists() and spec_of(path).absolute() != spec_file(store):
        raise StoreError(
            f"{path.name} is the name of the scenarios of {spec_of(path).name}, not of {spec_file(store).name}"
        )
    text = _appended(path, scenario, spec_file(store)) if path.exists() else scenario.text
    with whole_file(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return scenario


def _appended(path: Path, added: RecordedScenario, spec: Path) -> str:
    before = load_scenarios(path).file
    if spec_of(path).absolute().resolve() != spec.resolve():
        raise StoreError(f"{path} holds scenarios of {spec_of(path)}, not of {spec}; choose another file")
    if added.name in [scenario.name for scenario in before.scenarios]:
        raise StoreError(f"{path} already has a scenario `{added.name}`")
    old = path.read_text(encoding="utf-8")
    text = old.rstrip("\n") + "\n" + added.text[added.text.index("\nscenarios:\n") + len("\nscenarios:\n") :]
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        draft.write_text(text, encoding="utf-8")
        try:
            after = load_scenarios(draft).file
        except SpecError:
            after = None
    if after is None or after.scenarios[:-1] != before.scenarios or after.set != before.set:
        raise StoreError(f"{path}: a scenario cannot be added at the end of this file; choose another file")
    return text


def spec_file(store: RunReader) -> Path:
    """Return the file of a run's spec, as an absolute path.

    Raises:
        StoreError: it does not exist here.
    """
    path = Path(store.header.spec_path)
    places = [path.absolute(), *(Path(source) for source in store.header.sources if Path(source).name == path.name)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise StoreError(f"the spec of run {store.run_id}, {path}, does not exist here; a scenario needs it")
    return file


def _written(
    store: RunReader, episode_id: str, formats: Formats, spec: Path, folder: Path, *, everything: bool
) -> tuple[dict[str, Any], list[str]]:
    """The scenario as plain values, and notes."""
    trajectory = store.trajectory(episode_id)
    journal = store.journal(episode_id)
    overrides = [override for override in store.header.overrides if not override.startswith(_ELSEWHERE)]
    loaded = load_spec(spec, [*overrides, "backend={kind: scripted, replies: []}"])
    template = formats.of(loaded.spec.model, loaded.base)
    script = ScriptWriter(loaded, template, store, everything=everything)
    stored = store.task(trajectory.task_id)
    scripted = script.write(trajectory, journal, stored)
    scenario = {
        "name": f"{episode_id} of {store.run_id}",
        "about": ". ".join([f"Recorded by engine {store.header.engine_version}", *script.notes]) + ".",
        "task": task_of_scenario(stored, loaded, store),
        "sample": trajectory.sample_index,
        "set": changes_of(overrides, folder),
        **scripted,
        "expect": expected_of(trajectory, journal, loaded, script, stored),
    }
    always = ("name", "task", "replies", "expect")
    return {key: value for key, value in scenario.items() if value or key in always}, list(script.notes)


def changes_of(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Values of `--set` by key; paths that exist are relative to the file's folder."""
    changes: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        value = yaml.safe_load(text) if text else ""
        if isinstance(value, str) and value and not Path(value).is_absolute() and Path(value).exists():
            value = os.path.relpath(Path(value).absolute(), folder)
        changes[key] = value
    return changes


def _played(spec: Path, text: str, folder: Path, formats: Formats) -> str:
    """Play the file; return how the result differs, empty if it does not."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix=".scenario-", dir=folder, encoding="utf-8") as draft:
        draft.write(text)
        draft.flush()
        suite = run_suite(spec, formats, file=Path(draft.name))
    problems = [*suite.problems, *(problem for result in suite.results for problem in result.problems)]
    lines = [problem.message for problem in problems]
    for mismatch in [mismatch for result in suite.results for mismatch in result.differences]:
        lines += [f"@@ {mismatch.what} @@  (- recorded, + played)", mismatch.text]
    return "\n".join(lines)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = None
    if _BREAKS.search(value) or not value[:1].isalpha():  # the engine reads more texts as numbers than PyYAML
        style = '"'
    elif "\n" in value:
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(document: dict[str, Any]) -> str:
    """Write a document of plain values; `${` in texts is escaped, so that reading it gives the same values."""
    escaped = with_texts(document, lambda text: text.replace("${", "$${"))
    return yaml.dump(escaped, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
