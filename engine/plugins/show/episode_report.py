"""Prints an episode on a terminal: its messages, its rewards, and who moved which reward."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.cli.run_report import reasons_in_words
from engine.plugins.show.ledger_report import ledger_table, moves, print_moves
from engine.runner.summary import branch_reasons
from engine.store.codec import json_of
from engine.terminal import visible

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

    from engine.schemas.journal import JournalEntry
    from engine.schemas.message import Message
    from engine.schemas.trajectory import Outcome, Trajectory, Turn
    from engine.store.reader import RunReader
    from engine.store.reading import EpisodeRow

_VALUE = 2_000
"""Characters of a task's field or a fact that are shown."""
_STYLES = {"system": "dim", "user": "green", "assistant": "cyan", "tool": "yellow"}

_SHOWN = 100_000
"""Number of characters of a message that are printed."""


def status(row: EpisodeRow, run: str) -> str:
    """Return an episode's status, given its run's: an episode that was running when the run ended is interrupted."""
    return "broken off" if row.status == "running" and run != "running" else row.status


def ended(row: EpisodeRow) -> str:
    """Return how a finished episode ended, in a word or two."""
    if row.failure is not None:
        return f"failed: {row.failure} ({row.blame})"
    if row.limit is not None:
        return f"limit: {row.limit}"
    return "solved" if row.solved else row.event or ""


def print_finished(console: Console, store: RunReader, trajectory: Trajectory, row: EpisodeRow) -> None:
    """Print a finished episode of a run."""
    from rich.text import Text

    outcome = trajectory.outcome
    console.print(Text.assemble((trajectory.episode_id, "bold"), f" · {ended(row)}", _rest(outcome, trajectory, row)))
    _print_conversation(console, store, trajectory)
    if trajectory.postings:
        console.print()
        console.print(ledger_table(trajectory.postings))
    _print_judge(console, store, trajectory)
    _print_values(console, "facts", trajectory.facts)
    console.print()
    console.print(Text("Path: ", style="bold").append(_path(trajectory.path), style="none"))
    if outcome.failure is not None:
        failure = outcome.failure
        console.print()
        console.print(Text(f"Failed in {failure.state} at turn {failure.turn}: {failure.kind}", style="bold red"))
        console.print(Text(visible(f"blame: {failure.blame}\n{failure.message}"), style="red"))
        if failure.trace:
            console.print(Text(visible(failure.trace.rstrip()), style="dim"))


def _print_conversation(console: Console, store: RunReader, trajectory: Trajectory) -> None:
    """Print the task's fields and the messages, with the rewards of turns and what moved between them."""
    _print_values(console, "task", store.task(trajectory.task_id).fields)
    files = image_files(store, trajectory)
    spoken = sum(message.role == "assistant" for message in trajectory.messages)
    before = max(0, spoken - len(trajectory.turns))  # assistant messages of few-shot examples are not turns
    told = moves(trajectory.postings)
    count = 0
    for message in trajectory.messages:
        turn = None
        if message.role == "assistant":
            turn = trajectory.turns[count - before] if count >= before else None
            count += 1
            if turn is not None:
                print_moves(console, told.pop(turn.index - 1, []))
        _print_message(console, message, turn, files)
    for at_turn in sorted(told):
        print_moves(console, told[at_turn])


def _rest(outcome: Outcome, trajectory: Trajectory, row: EpisodeRow) -> str:
    sampled = sum(turn.end - turn.start for turn in trajectory.turns)
    words = [
        f"reward {outcome.reward:+.3f}",
        _count(len(trajectory.turns), "turn"),
        _count(sampled, "sampled token"),
        *(
            [_count(spoken, "token") + " of the user's model"]
            if (spoken := trajectory.counts.get("user_tokens"))
            else []
        ),
        _count(len(trajectory.branches), "training row") + reasons_in_words(branch_reasons(trajectory)),
        *(
            [f"{_count(lost, 'reply', 'replies')} not received"]
            if (lost := trajectory.counts.get("unreceived_replies"))
            else []
        ),
        "trainable" if outcome.trainable else "not trainable",
        f"seed {trajectory.seed}",
    ]
    if row.attempt:
        words.append(f"attempt {row.attempt + 1}")
    return "".join(f" · {word}" for word in words)


def _count(number: int, thing: str, things: str = "") -> str:
    return f"{number} {thing if number == 1 else things or f'{thing}s'}"


def _print_values(console: Console, title: str, values: Mapping[str, Any]) -> None:
    """Print the fields of a task or the facts, one line each."""
    from rich.text import Text

    if values:
        console.print(Text(f"\n{title}", style="bold"))
    for name, value in values.items():
        words = value if isinstance(value, str) else json_of(value)
        lines = words.splitlines() or [""]
        shown = "\n    ".join(lines if len(words) <= _VALUE else [f"{words[:_VALUE]}… ({len(words)} characters)"])
        console.print(Text(visible(f"  {name}: "), style="dim").append(visible(shown), style="not dim"))


def _print_judge(console: Console, store: RunReader, trajectory: Trajectory) -> None:
    """Print what the judge said, and the marks that the judge, the scorer and the environment gave at the end."""
    from rich.text import Text

    from engine.errors import StoreError
    from engine.schemas.journal import ScoreRecord

    try:
        journal = store.journal(trajectory.episode_id)
    except StoreError as error:  # the episode's result is whole without it
        console.print(Text(visible(f"\nwhat a judge said is not known: {error}"), style="yellow"))
        return
    for entry in journal:
        record = entry.record
        if not isinstance(record, ScoreRecord):
            continue
        for said in record.replies:
            console.print(Text("\njudge", style="bold magenta"))
            console.print(Text(visible("\n".join(f"  {line}" for line in said.splitlines()))))
        for event in record.rewards:
            given = "transfer" if event.value is None else f"{event.value:+.3f}"
            mark = f"{event.source or 'score'}: {event.name or 'reward'} {given} on turn {event.turn}"
            why = f" · {event.cause}" if event.cause else ""
            console.print(Text(visible(f"\n{mark}{why}"), style="magenta"))


def image_files(store: RunReader, trajectory: Trajectory) -> dict[str, Path]:
    """Write the images of an episode's messages to files in the cache folder, and return the files by digest."""
    from engine.errors import StoreError
    from engine.store.private import private_file, private_folder
    from engine.tokens.catalogue import cache_root

    folder = cache_root() / "view" / "images"
    found: dict[str, Path] = {}
    for digest in {image.image for message in trajectory.messages for image in message.images}:
        try:
            image = store.image(digest)
            name = digest.partition(":")[2]
            file = folder / f"{name}.{(image.mime or 'image/png').partition('/')[2].partition('+')[0]}"
            if not file.exists():
                private_folder(folder, exist_ok=True)
                draft = private_file(file.with_name(f".{file.name}.{os.getpid()}"))
                draft.write_bytes(image.data)
                draft.replace(file)
            found[digest] = file
        except (StoreError, OSError):  # the digest is printed without a file
            continue
    return found


def _print_message(console: Console, message: Message, turn: Turn | None, files: Mapping[str, Path]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    style = _STYLES[message.role]
    head = Text(f"\n{message.role}", style=f"bold {style}")
    if message.role == "tool" and message.name:
        head.append(visible(f" {message.name}"))
    if turn is not None:
        head.append(f" · turn {turn.index} · {_count(turn.end - turn.start, 'token')}", style="dim not bold")
        head.append(f" · {turn.event} · {turn.seconds:.2f} s", style="dim not bold")
        if turn.unreceived:
            head.append(" · nobody received it, so it is not trained", style="yellow not bold")
        rewards = ", ".join(f"{name} {value:+.3f}" for name, value in sorted(turn.rewards.items()))
        none = "no reward" if turn.branch >= 0 else "rewards are known at its end"
        head.append(f" · {rewards or none}", style="bold magenta" if rewards else "dim not bold")
    console.print(head)
    lines = []
    if message.reasoning:
        lines.append(Text(_beginning(message.reasoning.rstrip()), style="italic dim"))
    if message.text.strip():
        lines.append(Text(_beginning(message.text)))
    for call in message.tool_calls:
        arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        lines.append(Text(_beginning(f"→ {call.name}({arguments})"), style="yellow"))
    if lines or not message.images:
        console.print(Padding(Text("\n").join(lines), (0, 0, 0, 2)))
    for image in message.images:  # not wrapped, so that the path can be copied
        place = f" {files[image.image]}" if image.image in files else ""
        size = f"{image.width or '?'}×{image.height or '?'}"
        console.print(Text(f"  [image {image.image} {size}]{place}", style="dim"), soft_wrap=True)


def _path(path: Sequence[tuple[str, str, str]]) -> str:
    if not path:
        return "(no transition was taken)"
    return path[0][0] + "".join(f" –{event}→ {dest}" for _, event, dest in path)


def print_unfinished(
    console: Console, store: RunReader, row: EpisodeRow, journal: Sequence[JournalEntry], attempt: int | None = None
) -> None:
    """Print the messages and steps so far of an episode that is not done, or of an earlier attempt, from 0."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from engine.plugins.show.listing.unfinished import partial_episode

    told = f"{status(row, store.status)} · {_count(len(journal), 'step')} so far"
    if attempt is not None:
        told = f"attempt {attempt + 1} of {row.attempt + 1} · {_count(len(journal), 'step')}"
    console.print(Text.assemble((row.id, "bold"), f" · {told}"))
    if not journal:
        return
    trajectory = partial_episode(store, row, journal)
    _print_conversation(console, store, trajectory)
    console.print()
    table = Table("step", "state", "event", "to", "seconds", "what", box=box.SIMPLE_HEAD)
    table.columns[4].justify = "right"
    for entry in journal:
        table.add_row(
            str(entry.seq), entry.state, entry.event, entry.dest, f"{entry.seconds:.2f}", what_happened(entry)
        )
    console.print(table)
    _print_values(console, "facts", trajectory.facts)


def what_happened(entry: JournalEntry) -> Text:
    """Describe a journal entry in a few words."""
    from rich.text import Text

    from engine.schemas.journal import (
        FailureRecord,
        GenerationRecord,
        LimitRecord,
        ResetRecord,
        ScoreRecord,
        StepRecord,
        ToolsRecord,
        UserRecord,
    )

    record = entry.record
    match record:
        case GenerationRecord():
            words = f"{_count(len(record.generation.output_ids), 'token')}, {record.generation.finish.type}"
        case ToolsRecord():
            words = "; ".join(f"{result.name}: {result.error or _short(result.content)}" for result in record.results)
        case UserRecord():
            words = ("solved; " if record.turn.solved else "") + (
                "satisfied" if record.turn.satisfied else _short(record.turn.content)
            )
        case ResetRecord():
            words = _count(len(record.reset.messages), "message")
        case StepRecord():
            words = _count(len(record.step.messages), "message")
        case LimitRecord(overflow=True, limit="images"):
            words = f"{record.value:g} images: older ones are condensed"
        case LimitRecord(overflow=True):
            words = f"no room for a reply under {record.limit}: {record.value:g} tokens"
        case LimitRecord():
            words = f"{record.limit} reached {record.value:g}"
        case FailureRecord():
            words = f"{record.failure.kind} ({record.failure.blame}): {record.failure.message}"
        case ScoreRecord():
            words = _count(len(record.rewards), "reward")
        case _:
            words = record.words()
    return Text(visible(words))


def _beginning(text: str) -> str:
    """A text for the terminal, whose lines take long to lay out: its first `_SHOWN` characters, and how many are left out."""
    if len(text) <= _SHOWN:
        return visible(text)
    return f"{visible(text[:_SHOWN])}… ({len(text) - _SHOWN:,} more characters; --json has them all)"


def _short(content: object, most: int = 60) -> str:
    text = content if isinstance(content, str) else f"[{len(content) if isinstance(content, list) else 1} parts]"
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
