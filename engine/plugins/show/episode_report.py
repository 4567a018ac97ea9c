"""An episode on a terminal: its messages, its rewards and who moved them, its tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from engine.cli.run_report import reasons_in_words
from engine.errors import StoreError
from engine.plugins.show.listing.episode import moves, partial_episode, plain
from engine.plugins.show.listing.rows import outcome_word, status_word
from engine.plugins.show.listing.tokens import sampled_columns, token_columns
from engine.runner.summary import branch_reasons
from engine.schemas.journal import (
    FailureRecord,
    GenerationRecord,
    LimitRecord,
    RecordBase,
    ResetRecord,
    ScoreRecord,
    StepRecord,
    ToolsRecord,
    UserRecord,
)
from engine.store.codec import json_of
from engine.store.private import private_file, private_folder
from engine.store.reviews import review_facts
from engine.terminal import visible
from engine.tokens.catalogue import cache_root

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from engine.schemas.journal import JournalEntry
    from engine.schemas.message import Message
    from engine.schemas.reward import Posting
    from engine.schemas.trajectory import Trajectory, Turn
    from engine.store.reader import RunReader
    from engine.store.reading import EpisodeRow

_VALUE = 2_000
"""Characters of a task's field or a fact that are shown."""
_STYLES = {"system": "dim", "user": "green", "assistant": "cyan", "tool": "yellow"}

_SHOWN = 100_000
"""Number of characters of a message that are printed."""


def print_finished(console: Console, store: RunReader, trajectory: Trajectory, row: EpisodeRow) -> None:
    """Print a finished episode of a run."""
    outcome, counts = trajectory.outcome, trajectory.counts
    words = [
        outcome_word(row.failure, row.blame, row.limit, row.solved, row.event or ""),
        f"reward {outcome.reward:+.3f}",
        _count(len(trajectory.turns), "turn"),
        _count(sum(turn.end - turn.start for turn in trajectory.turns), "sampled token"),
        *([_count(spoken, "token") + " of the user's model"] if (spoken := counts.get("user_tokens")) else []),
        _count(len(trajectory.branches), "training row") + reasons_in_words(branch_reasons(trajectory)),
        *([f"{_count(lost, 'reply', 'replies')} not received"] if (lost := counts.get("unreceived_replies")) else []),
        "trainable" if outcome.trainable else "not trainable",
        f"seed {trajectory.seed}",
    ]
    if row.attempt:
        words.append(f"attempt {row.attempt + 1}")
    console.print(Text.assemble((trajectory.episode_id, "bold"), *(f" · {word}" for word in words)))
    _print_conversation(console, store, trajectory)
    if trajectory.postings:
        console.print()
        console.print(ledger_table(trajectory.postings))
    _print_judge(console, store, trajectory)
    _print_values(console, "facts", trajectory.facts | review_facts(store.folder)(trajectory.episode_id))
    console.print()
    path = trajectory.path[0][0] if trajectory.path else "(no transition was taken)"
    path += "".join(f" –{event}→ {dest}" for _, event, dest in trajectory.path)
    console.print(Text("Path: ", style="bold").append(path, style="none"))
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
    moved = move_lines(trajectory.postings)
    count = 0
    for message in trajectory.messages:
        turn = None
        if message.role == "assistant":
            turn = trajectory.turns[count - before] if count >= before else None
            count += 1
            if turn is not None:
                _print_moves(console, moved.pop(turn.index - 1, []))
        _print_message(console, message, turn, files)
    for at_turn in sorted(moved):
        _print_moves(console, moved[at_turn])


def _count(number: int, thing: str, things: str = "") -> str:
    return f"{number} {thing if number == 1 else things or f'{thing}s'}"


def _print_values(console: Console, title: str, values: Mapping[str, Any]) -> None:
    """Print the fields of a task or the facts, one line each."""
    if values:
        console.print(Text(f"\n{title}", style="bold"))
    for name, value in values.items():
        words = value if isinstance(value, str) else json_of(value)
        lines = words.splitlines() or [""]
        shown = "\n    ".join(lines if len(words) <= _VALUE else [f"{words[:_VALUE]}… ({len(words)} characters)"])
        console.print(Text(visible(f"  {name}: "), style="dim").append(visible(shown), style="not dim"))


def _print_judge(console: Console, store: RunReader, trajectory: Trajectory) -> None:
    """Print what the judge said, and the marks that the judge, the scorer and the environment gave at the end."""
    try:
        journal = store.journal(trajectory.episode_id)
    except StoreError as error:  # the episode's result is whole without it
        console.print(Text(visible(f"\nwhat a judge said is not known: {error}"), style="yellow"))
        return
    for entry in journal:
        record = entry.record
        if not isinstance(record, ScoreRecord):
            continue
        for reply in record.replies:
            console.print(Text("\njudge", style="bold magenta"))
            console.print(Text(visible("\n".join(f"  {line}" for line in reply.splitlines()))))
        for event in record.rewards:
            value = "transfer" if event.value is None else f"{event.value:+.3f}"
            mark = f"{event.source or 'score'}: {event.name or 'reward'} {value} on turn {event.turn}"
            why = f" · {event.cause}" if event.cause else ""
            console.print(Text(visible(f"\n{mark}{why}"), style="magenta"))


def image_files(store: RunReader, trajectory: Trajectory) -> dict[str, Path]:
    """Write the images of an episode's messages to files in the cache folder, and return the files by digest."""
    folder = cache_root() / "view" / "images"
    files: dict[str, Path] = {}
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
            files[digest] = file
        except (StoreError, OSError):  # the digest is printed without a file
            continue
    return files


def _print_message(console: Console, message: Message, turn: Turn | None, files: Mapping[str, Path]) -> None:

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


def print_unfinished(
    console: Console, store: RunReader, row: EpisodeRow, journal: Sequence[JournalEntry], attempt: int | None = None
) -> None:
    """Print the messages and steps so far of an episode that is not done, or of an earlier attempt, from 0."""
    steps = _count(len(journal), "step")
    words = f"{status_word(row.status, store.status)} · {steps} so far"
    if attempt is not None:
        words = f"attempt {attempt + 1} of {row.attempt + 1} · {steps}"
    console.print(Text.assemble((row.id, "bold"), f" · {words}"))
    if not journal:
        return
    trajectory = partial_episode(store, row, journal)
    _print_conversation(console, store, trajectory)
    console.print()
    table = Table("step", "state", "event", "to", "seconds", "what", box=box.SIMPLE_HEAD)
    table.columns[4].justify = "right"
    for entry in journal:
        table.add_row(
            str(entry.seq),
            entry.state,
            entry.event,
            entry.dest,
            f"{entry.seconds:.2f}",
            Text(visible(in_words(entry.record))),
        )
    console.print(table)
    _print_values(console, "facts", trajectory.facts)


def in_words(record: RecordBase) -> str:
    """Describe a record of a journal in a few words."""
    match record:
        case GenerationRecord():
            return f"{_count(len(record.generation.output_ids), 'token')}, {record.generation.finish.type}"
        case ToolsRecord():
            return "; ".join(f"{result.name}: {result.error or _short(result.content)}" for result in record.results)
        case UserRecord():
            reply = "satisfied" if record.turn.satisfied else _short(record.turn.content)
            return f"solved; {reply}" if record.turn.solved else reply
        case ResetRecord():
            return _count(len(record.reset.messages), "message")
        case StepRecord():
            return _count(len(record.step.messages), "message")
        case LimitRecord(overflow=True, limit="images"):
            return f"{record.value:g} images: older ones are condensed"
        case LimitRecord(overflow=True):
            return f"no room for a reply under {record.limit}: {record.value:g} tokens"
        case LimitRecord():
            return f"{record.limit} reached {record.value:g}"
        case FailureRecord():
            return f"{record.failure.kind} ({record.failure.blame}): {record.failure.message}"
        case ScoreRecord():
            return _count(len(record.rewards), "reward")
    return record.words()


def _beginning(text: str) -> str:
    """A text for the terminal, whose lines take long to lay out: its first `_SHOWN` characters, and how many are left
    out."""
    if len(text) <= _SHOWN:
        return visible(text)
    return f"{visible(text[:_SHOWN])}… ({len(text) - _SHOWN:,} more characters; --json has them all)"


def _short(content: object, most: int = 60) -> str:
    text = content if isinstance(content, str) else f"[{len(content) if isinstance(content, list) else 1} parts]"
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def move_lines(postings: Sequence[Posting]) -> dict[int, list[str]]:
    """Describe who moved or wrote which reward and why, one line each, by the turn that was newest when it happened."""
    lines: dict[int, list[str]] = {}
    for parts in moves(postings):
        first = parts[0]
        if first.op == "transfer":
            amount = sum(posting.delta for posting in parts if posting.delta > 0)
            payers = _turns({posting.turn for posting in parts if posting.delta < 0})
            receivers = _turns({posting.turn for posting in parts if posting.delta > 0})
            names = ", ".join(dict.fromkeys(posting.name for posting in parts))
            line = f"{names} {amount:.3f} moved from {payers} to {receivers}"
        else:
            value = f"set to {first.after:.3f}" if first.op == "set" else f"{first.delta:+.3f}"
            line = f"{first.name} {value} on turn {first.turn}"
        line += f" · {first.source}" + (f": {first.cause}" if first.cause else "")
        lines.setdefault(first.at_turn, []).append(line)
    return lines


def _turns(turns: set[int]) -> str:
    if not turns:
        return "no turn"
    return f"turn{'s' if len(turns) > 1 else ''} {', '.join(map(str, sorted(turns)))}"


def _print_moves(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(Padding(Text(visible(f"⇄ {line}"), style="magenta"), (0, 0, 0, 2)))


def ledger_table(postings: Sequence[Posting]) -> Table:
    """Return a table of all postings of the ledger: who moved what, when and why."""
    table = Table(
        "#", "at turn", "turn", "reward", "did", "change", "holds", "by", "why",
        title="Rewards", title_justify="left", box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for column in (table.columns[5], table.columns[6]):
        column.justify = "right"
    for posting in postings:
        place = str(posting.turn)
        if posting.start is not None:
            part = f"tokens {posting.start} to {posting.end}" if posting.call is None else f"call {posting.call}"
            place = f"{place}, {part}"
        table.add_row(
            str(posting.seq),
            str(posting.at_turn),
            place,
            Text(visible(posting.name)),
            posting.op,
            Text(f"{posting.delta:+.3f}", style="green" if posting.delta > 0 else "red" if posting.delta < 0 else ""),
            f"{posting.after:.3f}",
            Text(visible(posting.source)),
            Text(visible(posting.cause)),
        )
    return table


def token_documents(store: RunReader, episode_id: str, *, finished: bool) -> list[dict[str, Any]]:
    """Return the columns of each branch of an episode as JSON; of an unfinished one, its sampled tokens.

    Raises:
        StoreError: a record is damaged.
    """

    return [
        {name: plain(value.tolist()) if hasattr(value, "tolist") else plain(value) for name, value in columns.items()}
        for columns in _columns(store, episode_id, finished=finished)
    ]


def _columns(store: RunReader, episode_id: str, *, finished: bool) -> list[dict[str, Any]]:

    if not finished:
        return [sampled_columns(store, episode_id)]
    return [token_columns(store, episode_id, branch.index) for branch in store.trajectory(episode_id).branches]


def print_tokens(console: Console, store: RunReader, episode_id: str, *, finished: bool) -> None:
    """Print a table for each branch: a line for each sampled token, and a line for each part that the model did not
    sample.

    Raises:
        StoreError: a record is damaged.
    """
    for columns in _columns(store, episode_id, finished=finished):
        console.print()
        _print_branch(console, columns)


def _print_branch(console: Console, columns: dict[str, Any]) -> None:

    name = "Sampled tokens" if columns["branch"] < 0 else f"Branch {columns['branch']}"
    table = Table(
        "#", "turn", "mask", "id", "token", "log-prob", "advantage", "version",
        title=f"{name}: {len(columns['ids'])} tokens", title_justify="left", box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for at in (0, 1, 2, 3, 5, 6, 7):
        table.columns[at].justify = "right"
    texts, advantages = columns["texts"], columns["advantages"]
    kinds = {at: kind for kind, start, end in columns["kinds"] for at in range(start, end)}
    for (mask, kind), group in groupby(
        range(len(columns["ids"])), lambda at: (int(columns["mask"][at]), kinds.get(at, ""))
    ):
        places = list(group)
        if not mask:
            part = "".join(texts[at] for at in places) if texts is not None else ""
            shown = f"{kind}: {_quoted(part)}" if part else kind
            span = "–".join(map(str, dict.fromkeys((places[0], places[-1]))))
            table.add_row(span, "", "0", "", Text(shown, style="dim"))
            continue
        for at in places:
            table.add_row(
                str(at),
                str(columns["turns"][at]),
                "1",
                str(columns["ids"][at]),
                Text(_quoted(texts[at]) if texts is not None else ""),
                f"{columns['logprobs'][at]:.4f}",
                "" if advantages is None else f"{advantages[at]:+.4f}",
                str(columns["versions"][at]),
            )
    console.print(table)
    if columns["problem"]:
        console.print(f"no texts: {columns['problem']}", style="yellow")
    if columns["missing"]:
        console.print(f"no advantages: {columns['missing']}", style="yellow")


def _quoted(text: str, most: int = 60) -> str:
    """A text on one line, in quotes; a long one with its middle left out."""
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[-most // 2 :]}"
    return visible(f"'{text}'".replace("\n", "\\n").replace("\t", "\\t"), newlines=False)
