"""Rows of data sets for TRL and verl, made of a run's episodes.

| content | a row is | read by |
|---|---|---|
| turns | a prompt and one reply | TRL's SFTTrainer |
| conversations | a whole conversation | TRL's SFTTrainer with `assistant_only_loss` |
| preferences | a prompt, a better and a worse reply | TRL's DPOTrainer |
| prompts | a task's first prompt | TRL's GRPOTrainer, verl's RLHFDataset |

Invariant: a row holds nothing of an episode that may not be trained on, and no two rows are equal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from engine.errors import RenderError, StoreError
from engine.plugins.datasets.sft_rows import unusable
from engine.plugins.datasets.tables import Kind, Table, identity
from engine.spec.rows.sources import find
from engine.store.rows.columns import json_text
from engine.store.shown_messages import reply_numbers, shown_messages
from engine.tokens.tokenizer import MARK, unquote

if TYPE_CHECKING:
    from engine.schemas.message import Message
    from engine.schemas.trajectory import Trajectory, Turn
    from engine.store.reader import RunReader
    from engine.tokens.template import ChatTemplate

View = dict[str, Any]
GROUND_TRUTHS = ("ground_truth", "answer", "label", "target", "solution")
"""Fields of a task that hold its answer, in the order in which they are looked for."""
_MARK = "<image>"
"""The text that stands for an image in verl's prompts."""
_UNRECEIVED = "replies that an agent program did not receive"


@dataclass
class Losses:
    """What a data set does not carry, counted."""

    counts: Counter[str] = field(default_factory=Counter)
    """Number of things by what they are."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of things that have no row, by what they are."""

    def lines(self) -> list[str]:
        """One line for each, in a fixed order."""
        lost = [f"not carried: {count} {what}" for what, count in sorted(self.counts.items()) if count]
        return lost + [f"left out: {count} {what}" for what, count in sorted(self.left_out.items()) if count]


@dataclass(frozen=True)
class ShownTurn:
    """A reply and what the model was shown before it."""

    prompt: list[View]
    reply: View
    images: list[str]
    """Digests of the images of the prompt, in order."""
    whole: bool
    """Whether the reply ended by itself and all of it is in `reply`: no call was malformed, and it was not cut short."""


class RunTexts:
    """Makes messages of one run's episodes.

    Args:
        store: The run.
        template: The chat template of its model.
        losses: Counts what cannot be carried.
    """

    def __init__(self, store: RunReader, template: ChatTemplate, losses: Losses) -> None:
        self._template = template
        self._losses = losses
        self._tools = store.tool_schemas()
        self._known: tuple[str, dict[int, View]] = ("", {})

    def tools(self, trajectory: Trajectory) -> list[View]:
        """The schemas of the tools that the model was shown, as the run's folder has them."""
        schemas: list[View] = json.loads(self._tools(trajectory.episode_id) or "[]")
        return schemas

    def turn(self, trajectory: Trajectory, turn: Turn) -> ShownTurn:
        """One reply with its prompt."""
        if self._known[0] != trajectory.episode_id:
            self._known = (trajectory.episode_id, {})
        messages, numbers = shown_messages(trajectory, turn.index)
        turn_of = {at: number for number, at in enumerate(reply_numbers(trajectory))}
        views = [
            self._reply(trajectory, turn_of[number]) if number in turn_of else self._view(message)
            for message, number in zip(messages, numbers, strict=True)
        ]
        images = [part.image for message in messages[:-1] for part in message.images]
        whole = turn.event != "malformed" and turn.finish.type == "stop"
        return ShownTurn(views[:-1], views[-1], images, whole)

    def opening(self, trajectory: Trajectory) -> tuple[list[View], list[str]]:
        """What the model was shown before its first reply, with the digests of the images."""
        if trajectory.turns:
            first = self.turn(trajectory, trajectory.turns[0])
            return first.prompt, first.images
        shown = trajectory.messages
        return [self._view(message) for message in shown], [part.image for message in shown for part in message.images]

    def same_ids(self, trajectory: Trajectory, turn: Turn, shown: ShownTurn, tools: Sequence[View]) -> bool:
        """Whether the template writes the prompt and the reply of a turn with the ids of the run. Not for images."""
        branch = trajectory.branches[turn.branch]
        ids = branch.input_ids
        try:
            prompt = self._template.render_views(shown.prompt, list(tools) or None)
            whole = self._template.render_views([*shown.prompt, shown.reply], list(tools) or None)
        except RenderError:
            return False
        shown_ids: list[int] = ids[: turn.end].tolist()
        return prompt == shown_ids[: turn.start] and whole[: turn.end] == shown_ids

    def _reply(self, trajectory: Trajectory, number: int) -> View:
        known = self._known[1]
        if number not in known:
            turn = trajectory.turns[number]
            message = trajectory.messages[reply_numbers(trajectory)[number]]
            known[number] = self._sampled(trajectory, turn) if turn.end > turn.start else self._view(message)
        return known[number]

    def _sampled(self, trajectory: Trajectory, turn: Turn) -> View:
        ids = trajectory.branches[turn.branch].input_ids
        tools = self.tools(trajectory)
        parsed = self._template.replies.parse(
            ids[turn.start : turn.end], before=ids[: turn.start], turn=turn.index, tools=tools
        )
        return self._plain(self._template.views.of_reply(parsed, ids[turn.start : turn.end]))

    def _view(self, message: Message) -> View:
        try:
            view = self._template.views.of(message)
        except RenderError:  # the run's backend was shown more than this template can show
            self._losses.counts["messages that the chat template cannot show in full"] += 1
            view = {"role": message.role, "content": message.text}
        return self._plain(view)

    def _plain(self, view: View) -> View:
        """The view without the engine's marks: text that only spells a special token becomes that token elsewhere."""
        marked = _has_mark(view)
        if not marked:
            return view
        self._losses.counts[
            "messages whose text spells special tokens, which the trainer's tokenizer reads as tokens"
        ] += 1
        plain: View = _unquoted(view)
        return plain


def _has_mark(value: Any) -> bool:
    if isinstance(value, str):
        return MARK in value
    if isinstance(value, Mapping):
        return any(_has_mark(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(map(_has_mark, value))


def _unquoted(value: Any) -> Any:
    if isinstance(value, str):
        return unquote(value)
    if isinstance(value, Mapping):
        return {_unquoted(key): _unquoted(item) for key, item in value.items()}
    return [_unquoted(item) for item in value] if isinstance(value, list) else value


Row = dict[str, Any]


def _all(*_: Any) -> bool:
    return True


@dataclass
class Source:
    """The run that a data set is made of, and what of it is chosen."""

    store: RunReader
    template: ChatTemplate
    score: str | None = None
    """Label of a score whose rewards are used."""
    episode: Callable[[Trajectory], bool] = _all
    turn: Callable[[Trajectory, Turn], bool] = _all
    ground_truth: str | None = None
    """The task's field with its answer; by default the first of `GROUND_TRUTHS` that it has."""
    losses: Losses = field(default_factory=Losses)
    texts: RunTexts = field(init=False)

    def __post_init__(self) -> None:
        self.texts = RunTexts(self.store, self.template, self.losses)

    def episodes(self) -> Iterator[Trajectory]:
        """The chosen episodes, in the order of tasks and samples."""
        for trajectory in self.store.trajectories(self.score):
            reason = "episodes of an evaluation" if self.store.header.evaluation else unusable(trajectory)
            if reason is None and not self.episode(trajectory):
                reason = "episodes by the filter"
            if reason is None:
                yield trajectory
            else:
                self.losses.left_out[reason] += 1

    def groups(self) -> Iterator[list[Trajectory]]:
        """The chosen episodes of each task."""
        for _, group in groupby(self.episodes(), key=lambda trajectory: trajectory.task_id):
            yield list(group)

    @property
    def own_template(self) -> dict[str, Any]:
        """The variables of the chat template, if the spec sets any."""
        return dict(self.store.header.model.template_kwargs)

    def columns(self, **own: Kind) -> dict[str, Kind]:
        """The columns of a table, with those that only some runs have."""
        columns: dict[str, Kind] = dict(own)
        if self.own_template:
            columns["chat_template_kwargs"] = "json"
        if self.store.image_digests():
            columns["images"] = "images"
        return columns

    def shared(self, images: Sequence[str]) -> Row:
        """The values of those columns."""
        return {"chat_template_kwargs": self.own_template, "images": list(images)}

    def count_episode(self, trajectory: Trajectory, turns: Sequence[Turn]) -> None:
        """Count what messages do not hold of these turns."""
        lost = self.losses.counts
        sampled = sum(turn.end - turn.start for turn in turns)
        lost["sampled tokens, with their log-probs and weight versions: the trainer tokenises the texts again"] += (
            sampled
        )
        lost["turns with rewards of their own: the trainer has neither these nor the advantages"] += sum(
            1 for turn in turns if turn.rewards
        )

    def count_ids(self, trajectory: Trajectory, turn: Turn, shown: Any, tools: Sequence[View]) -> None:
        """Count a reply that the template writes with other ids than those that were sampled."""
        if isinstance(turn.finish.matched, str):
            what = "replies that a stop string ended: the chat template writes an end that the model did not sample"
            self.losses.counts[what] += 1
        if turn.end > turn.start and not shown.images and not self.texts.same_ids(trajectory, turn, shown, tools):
            self.losses.counts["replies that the chat template writes with other token ids than those of the run"] += 1


def turns_table(source: Source) -> Table:
    """A row for each chosen turn: `prompt` and `completion` as messages, `tools`."""

    def rows() -> Iterator[Row]:
        seen: set[bytes] = set()
        for trajectory in source.episodes():
            tools = source.texts.tools(trajectory)
            received = [turn for turn in trajectory.turns if not turn.unreceived]
            source.losses.left_out[_UNRECEIVED] += len(trajectory.turns) - len(received)
            chosen = [turn for turn in received if source.turn(trajectory, turn)]
            source.losses.left_out["turns by --turns"] += len(received) - len(chosen)
            kept = []
            for turn in chosen:
                shown = source.texts.turn(trajectory, turn)
                if not shown.whole:
                    source.losses.left_out[
                        "turns that were cut short or have a malformed call: a template writes them whole"
                    ] += 1
                    continue
                key = identity(shown.prompt, shown.reply, tools, shown.images)
                if key in seen:
                    source.losses.left_out["copies of other rows"] += 1
                    continue
                seen.add(key)
                kept.append(turn)
                source.count_ids(trajectory, turn, shown, tools)
                yield {
                    "prompt": shown.prompt,
                    "completion": [shown.reply],
                    "tools": tools or None,
                    "episode_id": trajectory.episode_id,
                    "turn": turn.index,
                    "reward": trajectory.outcome.reward,
                    **source.shared(shown.images),
                }
            source.count_episode(trajectory, kept)

    columns = source.columns(
        prompt="jsons", completion="jsons", tools="jsons", episode_id="text", turn="int", reward="float"
    )
    return Table(columns, rows())


def conversations_table(source: Source) -> Table:
    """A row for each branch: `messages` and `tools`."""

    def rows() -> Iterator[Row]:
        seen: set[bytes] = set()
        for trajectory in source.episodes():
            tools = source.texts.tools(trajectory)
            kept = []
            for branch in trajectory.branches:
                own = [turn for turn in trajectory.turns if turn.branch == branch.index]
                received = [turn for turn in own if not turn.unreceived]
                source.losses.left_out[_UNRECEIVED] += len(own) - len(received)
                own = received
                if not own:
                    continue
                shown = [source.texts.turn(trajectory, turn) for turn in own]
                if not all(one.whole for one in shown):
                    what = "conversations in which a turn was cut short or has a malformed call: a template writes it whole"
                    source.losses.left_out[what] += 1
                    continue
                messages = [*shown[-1].prompt, shown[-1].reply]
                key = identity(messages, tools, shown[-1].images)
                if key in seen:
                    source.losses.left_out["copies of other rows"] += 1
                    continue
                seen.add(key)
                kept += own
                for turn, one in zip(own, shown, strict=True):
                    source.count_ids(trajectory, turn, one, tools)
                examples = sum(message["role"] == "assistant" for message in messages) - len(own)
                source.losses.counts[
                    "replies in prompts that a trainer trains too: examples, and turns of other branches"
                ] += examples
                yield {
                    "messages": messages,
                    "tools": tools or None,
                    "episode_id": trajectory.episode_id,
                    "reward": trajectory.outcome.reward,
                    **source.shared(shown[-1].images),
                }
            source.count_episode(trajectory, kept)

    return Table(source.columns(messages="jsons", tools="jsons", episode_id="text", reward="float"), rows())


def preferences_table(source: Source) -> Table:
    """A row for each prompt with replies of different return: `prompt`, `chosen`, `rejected`, `tools`, `margin`.

    Two replies are compared if the model was shown exactly the same before them. The return of a reply is its episode's
    rewards from this turn on; the replies of the highest and the lowest return make the row.
    """

    def rows() -> Iterator[Row]:
        for group in source.groups():
            prompts: dict[bytes, list[tuple[float, Row, Trajectory, Turn]]] = {}
            for trajectory in group:
                tools = source.texts.tools(trajectory)
                for turn in trajectory.turns:
                    if turn.unreceived:
                        source.losses.left_out[_UNRECEIVED] += 1
                        continue
                    if not source.turn(trajectory, turn):
                        source.losses.left_out["turns by --turns"] += 1
                        continue
                    shown = source.texts.turn(trajectory, turn)
                    if not shown.whole:
                        source.losses.left_out[
                            "turns that were cut short or have a malformed call: a template writes them whole"
                        ] += 1
                        continue
                    later = sum(sum(each.rewards.values()) for each in trajectory.turns[turn.index :])
                    row = {"prompt": shown.prompt, "reply": shown.reply, "tools": tools or None, "images": shown.images}
                    prompts.setdefault(identity(shown.prompt, tools, shown.images), []).append(
                        (later, row, trajectory, turn)
                    )
            for replies in prompts.values():
                best = max(replies, key=lambda each: each[0])
                worst = min(replies, key=lambda each: each[0])
                if best[0] == worst[0] or best[1]["reply"] == worst[1]["reply"]:
                    source.losses.left_out["turns whose prompt has no second reply of another return"] += len(replies)
                    continue
                source.losses.left_out["turns of a prompt whose best and worst reply are others"] += len(replies) - 2
                for _, _, trajectory, turn in (best, worst):
                    source.count_episode(trajectory, [turn])
                yield {
                    "prompt": best[1]["prompt"],
                    "chosen": [best[1]["reply"]],
                    "rejected": [worst[1]["reply"]],
                    "tools": best[1]["tools"],
                    "margin": best[0] - worst[0],
                    **source.shared(best[1]["images"]),
                }

    columns = source.columns(prompt="jsons", chosen="jsons", rejected="jsons", tools="jsons", margin="float")
    return Table(columns, rows())


def prompts_table(source: Source) -> Table:
    """A row for each task, for TRL: `prompt`, `ground_truth`, `task`, and how the run's episodes of it ended."""

    def rows() -> Iterator[Row]:
        for told, prompt, images in _openings(source):
            yield {"prompt": prompt, **told, **source.shared(images)}

    columns = source.columns(
        prompt="jsons",
        task_id="text",
        ground_truth="text",
        task="json",
        episodes="int",
        mean_reward="float",
        solved="float",
    )
    return Table(columns, rows())


def verl_table(source: Source) -> Table:
    """A row for each task, for verl: `data_source`, `prompt`, `ability`, `reward_model`, `extra_info`, `images`.

    In `prompt` the mark `<image>` stands for each image.
    """

    def rows() -> Iterator[Row]:
        for index, (told, prompt, images) in enumerate(_openings(source)):
            spelled = sum(_text(message).count(_MARK) for message in prompt)
            if images and spelled:
                source.losses.left_out["tasks with images whose texts spell verl's mark <image>"] += 1
                continue
            extra = {"index": index, **told, "task": json_text(told["task"])}
            extra.pop("ground_truth")
            yield {
                "data_source": source.store.header.name,
                "prompt": [_marked(message) for message in prompt],
                "ability": source.store.header.name,
                "reward_model": {"style": "rule", "ground_truth": told["ground_truth"]},
                "extra_info": extra,
                "images": images,
            }

    columns = source.columns(data_source="text", prompt="jsons", ability="text", reward_model="json", extra_info="json")
    if columns.pop("chat_template_kwargs", None):
        source.losses.counts["variables of the chat template: set verl's data.apply_chat_template_kwargs"] += len(
            source.own_template
        )
    return Table(columns, rows())


def _openings(source: Source) -> Iterator[tuple[Row, list[View], list[str]]]:
    """For each task: what is known of it, its prompt, and its images."""
    spec, lost = (
        source.store.header.spec,
        source.losses.counts,
    )  # as it is stored, since a plugin that it uses may be gone
    for what, here in (
        ("environment: its steps, score and tools do not run in the trainer", bool(spec.get("environment"))),
        ("tools: give them to the trainer in its own form", bool(spec.get("tools"))),
        (
            "user: the trainer's episodes have one turn unless it has a user of its own",
            bool(spec.get("user") or spec.get("users")),
        ),
        ("scorer: give the trainer a reward function", bool(spec["rewards"].get("scorer"))),
    ):
        lost[what] += here
    for group in source.groups():
        first = group[0]
        prompt, images = source.texts.opening(first)
        lost["episodes: their replies and rewards, except the mean reward and the solved share of each task"] += len(
            group
        )
        key = identity(prompt, images)
        lost["prompts of samples that began otherwise than the first sample of their task"] += sum(
            key != identity(*source.texts.opening(other)) for other in group[1:]
        )
        fields = source.store.task(first.task_id).fields
        truth = _ground_truth(source, fields)
        if truth is None:
            lost["ground truths: the task has no field with its answer; name one with --ground-truth"] += 1
        told = {
            "task_id": first.task_id,
            "ground_truth": truth,
            "task": fields,
            "episodes": len(group),
            "mean_reward": sum(each.outcome.reward for each in group) / len(group),
            "solved": sum(each.outcome.solved for each in group) / len(group),
        }
        yield told, prompt, images


def _ground_truth(source: Source, fields: Row) -> str | None:
    named = source.ground_truth
    for name in (named,) if named is not None else GROUND_TRUTHS:
        there, value = find(name, fields)
        if there and value is not None:
            return value if isinstance(value, str) else json_text(value)
    if named is not None:
        raise StoreError(
            f"--ground-truth {named}: a task has no such field; its fields are {', '.join(fields) or 'none'}"
        )
    return None


def _text(message: View) -> str:
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return "".join(parts)


def _marked(message: View) -> View:
    """A message whose images are marks in its text."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": "".join(_MARK if part["type"] == "image" else part["text"] for part in content)}


TABLES: dict[str, dict[str, Callable[[Source], Table]]] = {
    "trl": {
        "turns": turns_table,
        "conversations": conversations_table,
        "preferences": preferences_table,
        "prompts": prompts_table,
    },
    "verl": {"prompts": verl_table},
}
"""The tables of each format, by content; the first one is the default."""
