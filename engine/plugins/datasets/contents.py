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
from engine.plugins.datasets.sft_rows import ExportedTurns
from engine.plugins.datasets.tables import Kind, identity
from engine.spec.rows.row import find
from engine.store.rows.columns import json_text
from engine.store.shown_messages import reply_numbers, shown_messages
from engine.tokens.tokenizer import unquote

if TYPE_CHECKING:
    from engine.schemas.message import Message
    from engine.schemas.trajectory import Trajectory, Turn
    from engine.store.reader import RunReader
    from engine.tokens.template import ChatTemplate

View = dict[str, Any]
Row = dict[str, Any]
GROUND_TRUTHS = ("ground_truth", "answer", "label", "target", "solution")
"""Fields of a task that hold its answer, in the order in which they are looked for."""
_MARK = "<image>"
"""The text that stands for an image in verl's prompts."""
_UNRECEIVED = "replies that an agent program did not receive"


@dataclass(frozen=True)
class ShownTurn:
    """A reply and what the model was shown before it."""

    prompt: list[View]
    reply: View
    images: list[str]
    """Digests of the images of the prompt, in order."""
    whole: bool
    """Whether the reply ended by itself and all of it is in `reply`: no call was malformed, and it was not cut
    short."""


def _unquoted(value: Any) -> Any:
    if isinstance(value, str):
        return unquote(value)
    if isinstance(value, Mapping):
        return {_unquoted(key): _unquoted(item) for key, item in value.items()}
    return [_unquoted(item) for item in value] if isinstance(value, list) else value


@dataclass
class ExportedRun:
    """The run that a data set is made of, what of it is chosen, and what the data set does not carry."""

    store: RunReader
    template: ChatTemplate
    selection: ExportedTurns
    score: str | None = None
    """Label of a score whose rewards are used."""
    ground_truth: str | None = None
    """The task's field with its answer; by default the first of `GROUND_TRUTHS` that it has."""
    lost: Counter[str] = field(default_factory=Counter)
    """Number of things that rows do not carry, by what they are."""

    def __post_init__(self) -> None:
        self._tools = self.store.tool_schemas()
        self._replies: tuple[str, dict[int, View]] = ("", {})
        self._seen: set[bytes] = set()

    def episodes(self) -> Iterator[Trajectory]:
        """The chosen episodes, in the order of tasks and samples."""
        return self.selection.trajectories(self.store, self.score)

    def groups(self) -> Iterator[list[Trajectory]]:
        """The chosen episodes of each task."""
        for _, group in groupby(self.episodes(), key=lambda trajectory: trajectory.task_id):
            yield list(group)

    def chosen_turns(self, trajectory: Trajectory) -> Iterator[tuple[Turn, ShownTurn]]:
        """The chosen turns of an episode that a template writes whole, each with its prompt and reply; the others are
        counted."""
        for turn in trajectory.turns:
            if turn.unreceived:
                self.selection.left_out[_UNRECEIVED] += 1
            elif not self.selection.turn(trajectory, turn):
                self.selection.left_out["turns by --turns"] += 1
            elif not (shown := self.turn(trajectory, turn)).whole:
                what = "turns that were cut short or have a malformed call: a template writes them whole"
                self.selection.left_out[what] += 1
            else:
                yield turn, shown

    def is_copy(self, *row: Any) -> bool:
        """Whether an equal row was there before; such a row is counted."""
        key = identity(*row)
        if key in self._seen:
            self.selection.left_out["copies of other rows"] += 1
            return True
        self._seen.add(key)
        return False

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template, if the spec sets any."""
        return dict(self.store.header.model.template_kwargs)

    def columns(self, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
        """The columns of a content, without those that this run has no values of."""
        there = {"chat_template_kwargs": bool(self.template_kwargs), "images": bool(self.store.image_digests())}
        return {name: kind for name, kind in kinds.items() if there.get(name, True)}

    def shared(self, images: Sequence[str]) -> Row:
        """The values of the columns that only some runs have."""
        return {"chat_template_kwargs": self.template_kwargs, "images": list(images)}

    def count_episode(self, turns: Sequence[Turn]) -> None:
        """Count what messages do not hold of these turns of an episode."""
        self.lost[
            "sampled tokens, with their log-probs and weight versions: the trainer tokenises the texts again"
        ] += sum(turn.end - turn.start for turn in turns)
        self.lost["turns with rewards of their own: the trainer has neither these nor the advantages"] += sum(
            bool(turn.rewards) for turn in turns
        )

    def count_ids(self, trajectory: Trajectory, turn: Turn, shown: ShownTurn, tools: Sequence[View]) -> None:
        """Count a reply that the template writes with other ids than those that were sampled."""
        if isinstance(turn.finish.matched, str):
            what = "replies that a stop string ended: the chat template writes an end that the model did not sample"
            self.lost[what] += 1
        if turn.end > turn.start and not shown.images and not self.same_ids(trajectory, turn, shown, tools):
            self.lost["replies that the chat template writes with other token ids than those of the run"] += 1

    def tools(self, trajectory: Trajectory) -> list[View]:
        """The schemas of the tools that the model was shown, as the run's folder has them."""
        schemas: list[View] = json.loads(self._tools(trajectory.episode_id) or "[]")
        return schemas

    def turn(self, trajectory: Trajectory, turn: Turn) -> ShownTurn:
        """One reply with its prompt."""
        if self._replies[0] != trajectory.episode_id:
            self._replies = (trajectory.episode_id, {})
        messages, numbers = shown_messages(trajectory, turn.index)
        turn_of = {at: number for number, at in enumerate(reply_numbers(trajectory))}
        views = [
            self._reply(trajectory, turn_of[number]) if number in turn_of else self._view(message)
            for message, number in zip(messages, numbers, strict=True)
        ]
        images = [part.image for message in messages[:-1] for part in message.images]
        is_whole = turn.event != "malformed" and turn.finish.type == "stop"
        return ShownTurn(views[:-1], views[-1], images, is_whole)

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
            prompt = self.template.render_views(shown.prompt, list(tools) or None)
            with_reply = self.template.render_views([*shown.prompt, shown.reply], list(tools) or None)
        except RenderError:
            return False
        shown_ids: list[int] = ids[: turn.end].tolist()
        return prompt == shown_ids[: turn.start] and with_reply[: turn.end] == shown_ids

    def _reply(self, trajectory: Trajectory, number: int) -> View:
        replies = self._replies[1]
        if number not in replies:
            turn = trajectory.turns[number]
            if turn.end > turn.start:
                ids = trajectory.branches[turn.branch].input_ids
                sampled, tools = ids[turn.start : turn.end], self.tools(trajectory)
                parsed = self.template.replies.parse(sampled, before=ids[: turn.start], turn=turn.index, tools=tools)
                replies[number] = self._plain(self.template.views.of_reply(parsed, sampled))
            else:
                replies[number] = self._view(trajectory.messages[reply_numbers(trajectory)[number]])
        return replies[number]

    def _view(self, message: Message) -> View:
        try:
            view = self.template.views.of(message)
        except RenderError:  # the run's backend was shown more than this template can show
            self.lost["messages that the chat template cannot show in full"] += 1
            view = {"role": message.role, "content": message.text}
        return self._plain(view)

    def _plain(self, view: View) -> View:
        """The view without the engine's marks: text that only spells a special token becomes that token elsewhere."""
        plain: View = _unquoted(view)
        self.lost["messages whose text spells special tokens, which the trainer's tokenizer reads as tokens"] += (
            plain != view
        )
        return plain

    def summary(self) -> list[str]:
        """One line for each thing that the data set does not carry, in a fixed order."""
        lines = [f"not carried: {count} {what}" for what, count in sorted(self.lost.items()) if count]
        return lines + self.selection.summary()


def turn_rows(source: ExportedRun) -> Iterator[Row]:
    """A row for each chosen turn: `prompt` and `completion` as messages, `tools`."""
    for trajectory in source.episodes():
        tools = source.tools(trajectory)
        exported = []
        for turn, shown in source.chosen_turns(trajectory):
            if source.is_copy(shown.prompt, shown.reply, tools, shown.images):
                continue
            exported.append(turn)
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
        source.count_episode(exported)


def conversation_rows(source: ExportedRun) -> Iterator[Row]:
    """A row for each branch: `messages` and `tools`."""
    for trajectory in source.episodes():
        tools = source.tools(trajectory)
        exported = []
        for branch in trajectory.branches:
            turns_of_branch = [turn for turn in trajectory.turns if turn.branch == branch.index]
            turns = [turn for turn in turns_of_branch if not turn.unreceived]
            source.selection.left_out[_UNRECEIVED] += len(turns_of_branch) - len(turns)
            if not turns:
                continue
            shown = [source.turn(trajectory, turn) for turn in turns]
            if not all(turn.whole for turn in shown):
                what = "conversations in which a turn was cut short or has a malformed call: a template writes it whole"
                source.selection.left_out[what] += 1
                continue
            messages = [*shown[-1].prompt, shown[-1].reply]
            if source.is_copy(messages, tools, shown[-1].images):
                continue
            exported += turns
            for turn, shown_turn in zip(turns, shown, strict=True):
                source.count_ids(trajectory, turn, shown_turn, tools)
            examples = sum(message["role"] == "assistant" for message in messages) - len(turns)
            source.lost["replies in prompts that a trainer trains too: examples, and turns of other branches"] += (
                examples
            )
            yield {
                "messages": messages,
                "tools": tools or None,
                "episode_id": trajectory.episode_id,
                "reward": trajectory.outcome.reward,
                **source.shared(shown[-1].images),
            }
        source.count_episode(exported)


def preference_rows(source: ExportedRun) -> Iterator[Row]:
    """A row for each prompt with replies of different return: `prompt`, `chosen`, `rejected`, `tools`, `margin`.

    Two replies are compared if the model was shown exactly the same before them. The return of a reply is its episode's
    rewards from this turn on; the replies of the highest and the lowest return make the row.
    """
    for group in source.groups():
        prompts: dict[bytes, list[tuple[float, Row, Turn]]] = {}
        for trajectory in group:
            tools = source.tools(trajectory)
            for turn, shown in source.chosen_turns(trajectory):
                later = sum(sum(other.rewards.values()) for other in trajectory.turns[turn.index :])
                row = {"prompt": shown.prompt, "reply": shown.reply, "tools": tools or None, "images": shown.images}
                key = identity(shown.prompt, tools, shown.images)
                prompts.setdefault(key, []).append((later, row, turn))
        for replies in prompts.values():
            best = max(replies, key=lambda reply: reply[0])
            worst = min(replies, key=lambda reply: reply[0])
            if best[0] == worst[0] or best[1]["reply"] == worst[1]["reply"]:
                source.selection.left_out["turns whose prompt has no second reply of another return"] += len(replies)
                continue
            source.selection.left_out["turns of a prompt whose best and worst reply are others"] += len(replies) - 2
            for _, _, turn in (best, worst):
                source.count_episode([turn])
            yield {
                "prompt": best[1]["prompt"],
                "chosen": [best[1]["reply"]],
                "rejected": [worst[1]["reply"]],
                "tools": best[1]["tools"],
                "margin": best[0] - worst[0],
                **source.shared(best[1]["images"]),
            }


def prompt_rows(source: ExportedRun) -> Iterator[Row]:
    """A row for each task, for TRL: `prompt`, `ground_truth`, `task`, and how the run's episodes of it ended."""
    for about, prompt, images in _openings(source):
        yield {"prompt": prompt, **about, **source.shared(images)}


def verl_rows(source: ExportedRun) -> Iterator[Row]:
    """A row for each task, for verl: `data_source`, `prompt`, `ability`, `reward_model`, `extra_info`, `images`.

    In `prompt` the mark `<image>` stands for each image.
    """
    if source.template_kwargs:
        source.lost["variables of the chat template: set verl's data.apply_chat_template_kwargs"] += len(
            source.template_kwargs
        )
    for index, (about, prompt, images) in enumerate(_openings(source)):
        if images and any(_MARK in json_text(message["content"]) for message in prompt):
            source.selection.left_out["tasks with images whose texts spell verl's mark <image>"] += 1
            continue
        extra = {"index": index, **about, "task": json_text(about["task"])}
        extra.pop("ground_truth")
        yield {
            "data_source": source.store.header.name,
            "prompt": [_marked(message) for message in prompt],
            "ability": source.store.header.name,
            "reward_model": {"style": "rule", "ground_truth": about["ground_truth"]},
            "extra_info": extra,
            "images": images,
        }


def _openings(source: ExportedRun) -> Iterator[tuple[Row, list[View], list[str]]]:
    """For each task: what is known of it, its prompt, and its images."""
    spec = source.store.header.spec  # as it is stored, since a plugin that it uses may be gone
    lost = source.lost
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
        prompt, images = source.opening(first)
        lost["episodes: their replies and rewards, except the mean reward and the solved share of each task"] += len(
            group
        )
        key = identity(prompt, images)
        lost["prompts of samples that began otherwise than the first sample of their task"] += sum(
            key != identity(*source.opening(other)) for other in group[1:]
        )
        fields = source.store.task(first.task_id).fields
        truth = _ground_truth(source, fields)
        if truth is None:
            lost["ground truths: the task has no field with its answer; name one with --ground-truth"] += 1
        about = {
            "task_id": first.task_id,
            "ground_truth": truth,
            "task": fields,
            "episodes": len(group),
            "mean_reward": sum(episode.outcome.reward for episode in group) / len(group),
            "solved": sum(episode.outcome.solved for episode in group) / len(group),
        }
        yield about, prompt, images


def _ground_truth(source: ExportedRun, fields: Row) -> str | None:
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


def _marked(message: View) -> View:
    """A message whose images are marks in its text."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": "".join(_MARK if part["type"] == "image" else part["text"] for part in content)}


_SHARED: dict[str, Kind] = {"chat_template_kwargs": "json", "images": "images"}
_TURNS: dict[str, Kind] = {
    "prompt": "jsons",
    "completion": "jsons",
    "tools": "jsons",
    "episode_id": "text",
    "turn": "int",
    "reward": "float",
    **_SHARED,
}
_CONVERSATIONS: dict[str, Kind] = {
    "messages": "jsons",
    "tools": "jsons",
    "episode_id": "text",
    "reward": "float",
    **_SHARED,
}
_PREFERENCES: dict[str, Kind] = {
    "prompt": "jsons",
    "chosen": "jsons",
    "rejected": "jsons",
    "tools": "jsons",
    "margin": "float",
    **_SHARED,
}
_PROMPTS: dict[str, Kind] = {
    "prompt": "jsons",
    "task_id": "text",
    "ground_truth": "text",
    "task": "json",
    "episodes": "int",
    "mean_reward": "float",
    "solved": "float",
    **_SHARED,
}
_VERL: dict[str, Kind] = {
    "data_source": "text",
    "prompt": "jsons",
    "ability": "text",
    "reward_model": "json",
    "extra_info": "json",
    "images": "images",
}
TABLES: dict[str, dict[str, tuple[Mapping[str, Kind], Callable[[ExportedRun], Iterator[Row]]]]] = {
    "trl": {
        "turns": (_TURNS, turn_rows),
        "conversations": (_CONVERSATIONS, conversation_rows),
        "preferences": (_PREFERENCES, preference_rows),
        "prompts": (_PROMPTS, prompt_rows),
    },
    "verl": {"prompts": (_VERL, verl_rows)},
}
