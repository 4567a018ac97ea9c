"""Environments of Gymnasium 1.x, unchanged: text and rendered frames, discrete, text and structured actions.

    environment:
      adapter: gymnasium
      use: FrozenLake-v1
      with: {kwargs: {is_slippery: false}, show: [ansi], actions: [left, down, right, up]}

A reply holds one action, in `<answer>…</answer>` or else as its whole text. An action that cannot be read is answered
with words that say what is wrong, and the environment is not stepped. `terminated` ends the episode with the event
`done`, `truncated` with `truncated`.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.errors import AdapterError
from engine.plugins.adapters.base import add_to_path, facts_of, field_of, library, parts_of, reward_of, stepped
from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import ContentPart, Message, TextPart, image_part

NAME = "gymnasium"
SHOWN = ("observation", "ansi", "rgb_array")
"""What a turn may show: the observation as text, or a rendered frame as text or as an image."""
ANSWER = r"(?s)<answer>\s*(.*?)\s*</answer>"
MOST_NUMBERS = 2048
"""Observations of more numbers are shown as text only where the spec says so."""
PLAIN = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text")
"""The spaces of Gymnasium whose elements can be written, beside `Dict` and `Tuple` of such spaces."""


def load(use: str, base: str = ".", path: Sequence[str] = (), modules: Sequence[str] = (), **_: Any) -> Any:
    """Load what all environments of this process share. The arguments are those of `GymnasiumEnvironment`."""
    add_to_path(path, base)
    gym = library(NAME, "gymnasium")
    for module in modules:
        library(NAME, module)
    return gym


class GymnasiumEnvironment:
    """One episode of a Gymnasium environment.

    Args:
        use: A registered id; `module:Id` imports the module first.
        base: The spec's folder.
        kwargs: Arguments of `gymnasium.make`.
        show: What each turn shows: `observation`, `ansi`, `rgb_array`, or several in this order (one of the last two).
            Left out: the observation, unless it is as large as a screen.
        pass_render_mode: Whether `make` is given `render_mode`; VisGym's environments do not take it and render without
            it.
        actions: The names of a discrete space's actions in order, or elements of any space by name; `text`: the reply's
            action is passed on as it is. Left out: the action is read as a Python literal of the environment's action
            space.
        answer: Regular expression for the action in a reply: its last match, group 1; without a match, the whole reply.
        prompt: A method of the environment's that gives the first message's text, such as VisGym's `get_prompt`; empty:
            the first message is what is shown. Left out: what the environment's documentation says of the task, and how
            to write an action.
        feedback: A key of `info` or an attribute of the environment's whose text each step shows first.
        seed: The task's field with the seed of `reset`; dotted. Without it, the episode's own seed: then samples of one
            task begin differently.
        options: The task's field with the options of `reset`; dotted.
        modules: Modules to import first, because they register ids.
        path: Folders to put on the import path; relative to the spec.

    Raises:
        AdapterError: Gymnasium is not installed, `show`, `actions` or `answer` does not fit the environment, its
            actions cannot be written, or a folder of `path` is not there.
    """

    events = ("continue", "done", "truncated")

    def __init__(
        self,
        use: str,
        base: str = ".",
        kwargs: Mapping[str, Any] | None = None,
        show: str | Sequence[str] | None = None,
        pass_render_mode: bool = True,
        actions: str | Sequence[str] | Mapping[str, Any] | None = None,
        answer: str = ANSWER,
        prompt: str | None = None,
        feedback: str | None = None,
        seed: str = "seed",
        options: str = "options",
        modules: Sequence[str] = (),
        path: Sequence[str] = (),
    ) -> None:
        self._show = [show] if isinstance(show, str) else ["observation"] if show is None else list(show)
        modes = [item for item in self._show if item != "observation"]
        if not set(self._show) <= set(SHOWN) or len(modes) > 1:
            raise AdapterError(f"`show` is {', '.join(SHOWN)}, or `observation` with one of the others; not {show!r}")
        try:
            self._answer = re.compile(answer)
        except re.error as error:
            raise AdapterError(f"`answer` is no regular expression: {error}") from None
        if self._answer.groups < 1:
            raise AdapterError("`answer` needs a group: write `<answer>(.*?)</answer>`")
        self._gym = load(use, base, path, modules)
        self._as_text = actions == "text"
        if isinstance(actions, str) and not self._as_text:
            raise AdapterError(f"`actions` is a list of names, a mapping, or `text`; not {actions!r}")
        self._use, self._prompt, self._feedback, self._seed, self._options = use, prompt, feedback, seed, options
        rendering = {"render_mode": modes[0]} if modes and pass_render_mode else {}
        self._env = self._gym.make(use, **{**dict(kwargs or {}), **rendering})
        render_modes = self._env.metadata.get("render_modes") or []
        if rendering and modes[0] not in render_modes:
            raise AdapterError(f"`show: {modes[0]}`: `{use}` renders {', '.join(map(str, render_modes)) or 'nothing'}")
        if show is None and (count := _count(self._env.observation_space)) > MOST_NUMBERS:
            ways = [f"`show: {way}` or " for way in ("rgb_array", "ansi") if way in render_modes]
            words = f"an observation of `{use}` has {count:,} numbers, such as the pixels of a screen: write "
            raise AdapterError(f"{words}{''.join(ways)}`show: observation`; the last shows each number as text")
        self._names = {} if actions is None or isinstance(actions, str) else self._named(actions)
        unread = [] if actions is not None else list(unwritable(self._env.action_space, self._gym.spaces))
        if unread:
            raise AdapterError(
                f"actions of `{use}` cannot be written: {unread[0]}; name some (`actions: {{…}}`) or write "
                "`actions: text`"
            )

    def reset(self, task: Task, seed: int) -> Reset:
        """Reset the environment with the task's seed and options."""
        seed_of_task = field_of(task.fields, self._seed)
        observation, info = self._env.reset(
            seed=seed if seed_of_task is None else int(seed_of_task), options=field_of(task.fields, self._options)
        )
        text = self._described() if self._prompt is None else self._prompt and str(self._of(self._prompt)())
        return Reset(messages=self._said(observation, text), facts=facts_of(info, "reset"))

    def step(self, view: EpisodeView) -> Step:
        """Step the environment with the reply's action, or say why it is none.

        Raises:
            AdapterError: it answered in another form, or gave a reward that is no number.
        """
        answers = self._answer.findall(view.reply)
        last = answers[-1] if answers else view.reply
        written = (last[0] if isinstance(last, tuple) else last).strip()
        action, problem = self._action(written)
        if problem is not None:
            facts = {"invalid_actions": int(view.facts.get("invalid_actions", 0)) + 1}
            return stepped(
                messages=[Message(role="user", content=problem)], reward=None, cause="", over=False, facts=facts
            )
        form = "(observation, reward, terminated, truncated, info)"
        observation, reward, terminated, truncated, info = parts_of(self._env.step(action), form, "step")
        over = bool(terminated) or bool(truncated)
        return stepped(
            messages=[] if over else self._said(observation, self._feedback_in(info)),
            reward=reward_of(reward, "step"),
            cause=f"action {written[:80]}",
            over=over,
            truncated=bool(truncated) and not terminated,
            facts=facts_of(info, "step"),
        )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _of(self, name: str) -> Any:
        """A method or attribute of the environment itself, beneath its wrappers."""
        return getattr(self._env.unwrapped, name)

    def _described(self) -> str:
        """The task in the words of the environment's documentation, without code, and how an action is written."""
        page = re.sub(r"(?s)```.*?```\n*", "", inspect.cleandoc(type(self._env.unwrapped).__doc__ or ""))
        intro, *sections = re.split(r"(?m)^ *#+ +", page)
        titles = ["Description", "Reward", "Episode End"]
        if "observation" in self._show:
            titles.append("Observation Space")
        how = ", as text" if self._as_text else f": one of {', '.join(self._names)}"
        if not self._as_text and not self._names:
            space = self._env.action_space
            titles.append("Action Space")
            how = f": an element of {space}, such as {example_of(space)}"
        where = " It may stand between <answer> and </answer>." if self._answer.pattern == ANSWER else ""
        texts = [intro, *(text for text in sections if text.startswith(tuple(titles)))]
        texts = [f"You act in `{self._use}`.", *texts, f"Each reply is one action{how}.{where}"]
        return "\n\n".join(text.strip() for text in texts if text.strip())

    def _feedback_in(self, info: Any) -> str:
        """The step's own words, from `info` or from the environment."""
        if self._feedback is None:
            return ""
        in_info = isinstance(info, Mapping) and self._feedback in info
        words = info[self._feedback] if in_info else self._of(self._feedback)
        return "" if words is None else str(words)

    def _said(self, observation: Any, words: str) -> list[Message]:
        """A message with words and what the turn shows."""
        parts: list[ContentPart] = [TextPart(text=words)] if words else []
        for item in self._show:
            if item == "rgb_array":
                frame = self._env.render()
                if not callable(getattr(frame, "save", None)):  # an array, and no image of PIL
                    from PIL import Image

                    try:
                        frame = Image.fromarray(frame)
                    except (TypeError, ValueError, AttributeError, KeyError):
                        raise AdapterError(
                            f"render gave a {type(frame).__name__}, which is no frame (uint8 [height, width, 3])"
                        ) from None
                parts.append(image_part(frame))
            else:
                shown = _plain(observation) if item == "observation" else str(self._env.render())
                parts.append(TextPart(text=shown if isinstance(shown, str) else repr(shown)))
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        return [Message(role="user", content="\n\n".join(texts) if len(texts) == len(parts) else parts)]

    def _action(self, written: str) -> tuple[Any, str | None]:
        """The action that a reply names, or what is wrong with it."""
        if self._as_text:
            return written, None
        if self._names:
            if written.lower() not in self._names:
                return None, f"`{written[:80]}` is no action. Write one of: {', '.join(self._names)}."
            return self._names[written.lower()], None
        space = self._env.action_space
        try:
            return read_action(written, space, self._gym.spaces), None
        except ValueError:
            return None, f"`{written[:80]}` is no action. Write an element of {space}, such as {example_of(space)}."

    def _named(self, actions: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
        """The elements of the action space, by their names.

        Raises:
            AdapterError: a name stands for what is not in the space.
        """
        space = self._env.action_space
        first = int(getattr(space, "start", 0))
        pairs = (
            actions.items() if isinstance(actions, Mapping) else ((name, first + at) for at, name in enumerate(actions))
        )
        elements = {}
        for name, value in pairs:
            try:
                element = as_element(space, value, self._gym.spaces)
                fits = space.contains(element)
            except (ValueError, TypeError, KeyError):
                element, fits = value, False
            if not fits:
                raise AdapterError(f"`actions`: `{name}` is {value!r}, which is not in {space}")
            elements[str(name).strip().lower()] = element
        return elements


def _count(space: Any) -> int:
    """The numbers of an element of a space."""
    inner = getattr(space, "spaces", None)
    if inner is None:
        return math.prod(space.shape or ())
    return sum(map(_count, inner.values() if isinstance(inner, Mapping) else inner))


def _plain(value: Any, decimals: int | None = None) -> Any:
    """An observation or an element of a space with plain Python values: arrays as lists, floats with at most so many
    decimals."""
    if isinstance(value, Mapping):
        return {key: _plain(item, decimals) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_plain(item, decimals) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if hasattr(value, "tolist"):
        return value.tolist() if decimals is None else _plain(value.tolist(), decimals)
    rounds = decimals is not None and isinstance(value, float) and math.isfinite(value)
    return round(value, decimals) if rounds else value


# ---- actions, which are written as Python literals: `2`, `[0.5, -1.0]`, `{'move': 1, 'say': 'hi'}`; lists stand for
# arrays and tuples


def unwritable(space: Any, spaces: Any, at: str = "") -> Iterator[str]:
    """The parts of a space whose elements cannot be written, each with its place.

    Args:
        space: The space.
        spaces: The module `gymnasium.spaces`.
        at: The place of the space in a larger one.
    """
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from unwritable(part, spaces, f"{at}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from unwritable(part, spaces, f"{at}[{index}]")
    elif not isinstance(space, tuple(getattr(spaces, name) for name in PLAIN)):
        yield f"{type(space).__name__}{f' at {at}' if at else ''}"


def read_action(text: str, space: Any, spaces: Any) -> Any:
    """The element of a space that a text names.

    Raises:
        ValueError: it names none.
    """
    if isinstance(space, spaces.Text):
        value: Any = text
    else:
        try:
            value = as_element(space, ast.literal_eval(text), spaces)
        except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None
    if not space.contains(value):
        raise ValueError(f"not in {space}")
    return value


def as_element(space: Any, value: Any, spaces: Any) -> Any:
    """A literal with the types that a space checks for: arrays for `Box`, `MultiDiscrete` and `MultiBinary`, tuples for
    `Tuple`.

    Raises:
        ValueError: it has other parts than the space, a number would be rounded, or one is not finite.
        TypeError: it has another form.
        KeyError: it has a part that the space does not have.
    """
    if isinstance(space, spaces.Dict):
        return {key: as_element(space.spaces[key], item, spaces) for key, item in dict(value).items()}
    if isinstance(space, spaces.Tuple):
        return tuple(as_element(part, item, spaces) for part, item in zip(space.spaces, value, strict=True))
    if not isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return value
    import numpy as np

    numbers = np.asarray(value)
    if numbers.dtype.kind not in "biuf" or not np.isfinite(numbers).all():
        raise ValueError("an array needs finite numbers")
    cast = numbers.astype(space.dtype)
    if cast.dtype.kind != "f" and not (cast == numbers).all():
        raise ValueError(f"numbers of the type {space.dtype} are needed")
    return cast


def example_of(space: Any) -> str:
    """An element of a space as text; the same one each time. The space's own random numbers are not drawn. With two
    decimals, floats mostly stay in their space."""
    fresh = copy.deepcopy(space)
    fresh.seed(0)
    return repr(_plain(fresh.sample(), decimals=2))
