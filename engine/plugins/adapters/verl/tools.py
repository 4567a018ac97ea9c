"""verl's tools, unchanged: the YAML of `tool_config_path`, its classes, and the rows' `tools_kwargs`.

    tasks: {source: parquet, path: train.parquet, preset: verl, id: extra_info.index}
    environment: {adapter: verl, use: gsm8k_tool_config.yaml}
    machine: tools

A tool is a class with `create`, `execute`, `calc_reward` and `release`; one object of it serves all episodes of a
process, as in verl, and tells its instances apart by `instance_id`. Two orders of calls exist:

- `lifetime: call` (verl since 0.6, `ToolAgentLoop._call_tool` of verl 0.9.1): each call of the model makes an instance,
  executes it once and releases it. `calc_reward` is not called.
- `lifetime: episode` (the SGLang rollout of verl until 0.5): one instance for each tool in each episode. At the end,
  `calc_reward` is called, then `release`.

What a tool raises is shown to the model in verl's own words, with reward 0. Instances are released in every case.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from engine.errors import AdapterError
from engine.plugins.adapters.base import add_to_path, facts_of, field_of, parts_of, reward_of
from engine.plugins.adapters.verl.interactions import as_chat, entries, one_of_loop
from engine.plugins.adapters.verl.modules import schema_class, verl_importable
from engine.schemas.environment import EpisodeView, Reset, Task, ToolReply
from engine.schemas.message import ContentPart, TextPart, image_part
from engine.schemas.reward import PartAddress, RewardEvent
from engine.schemas.trajectory import Blame
from engine.spec.code.entry import load_entry
from engine.spec.code.signature import DescribedTool

NAME = "verl"
REWARD = "tool_reward"
"""The name of the reward that `execute` returns."""
KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
"""What a row may have for each tool."""
VIEW = "<view>"
"""The argument with the episode's view: a name that no parameter of a tool has."""
PLACES = ("tools_kwargs", "extra_info.tools_kwargs")
"""Where a row of verl's may have its tools' arguments."""


class ToolAnswerError(AdapterError):
    """A tool's class does not fit verl's interface, or its answer does not. It fails the episode."""

    kind = "tool_bad_result"
    blame: Blame = "tool"


def load(use: str, base: str = ".", path: Sequence[str] = (), **_: Any) -> Any:
    """Load what all tools of this process share: verl, which takes seconds to import where it is installed. The
    arguments are those of `VerlTools`."""
    add_to_path(path, base)
    with verl_importable():
        return schema_class()


class VerlTools:
    """The tools of one episode, from verl's YAML.

    Args:
        use: The YAML file.
        base: The spec's folder.
        lifetime: How long an instance of a tool lives: for one call of the model, or for the episode.
        kwargs: The task's field with the tools' arguments; dotted. Left out: `tools_kwargs`, then
            `extra_info.tools_kwargs`.
        path: Folders to put on the import path; relative to the spec.

    Raises:
        AdapterError: the file is not verl's tool YAML, a class cannot be imported, or a folder of `path` is not there.
    """

    def __init__(
        self,
        use: str,
        base: str = ".",
        lifetime: Literal["call", "episode"] = "call",
        kwargs: str | None = None,
        path: Sequence[str] = (),
    ) -> None:
        if lifetime not in ("call", "episode"):
            raise AdapterError(f"`lifetime` is `call` or `episode`, not {lifetime!r}")
        add_to_path(path, base)
        file = Path(base) / Path(use).expanduser()
        if not file.is_file():
            raise AdapterError(f"there is no file `{file}`; `use` is relative to the spec's folder")
        self._lifetime = lifetime
        self._places = (kwargs,) if kwargs is not None else PLACES
        tools = [one_of_loop([base, item], partial(_tool, item, base)) for item in _native(file)]
        self._tools = {str(tool.name): tool for tool in tools}
        if len(self._tools) != len(tools):
            raise AdapterError(
                f"`{file.name}` has two tools with one name; give each its own `tool_schema.function.name`"
            )
        self._kwargs: dict[str, dict[str, Any]] = {}
        self._instances: dict[str, str] = {}
        """The instance of each tool, with `lifetime: episode`."""
        self._data = AgentData()
        if lifetime == "call":
            for tool in tools:
                _check(tool.create, create_kwargs={})
                _check(tool.execute, "", {}, agent_data=None)

    def tools(self) -> list[DescribedTool]:
        """The tools with the schemas that verl shows to the model."""
        return [VerlTool(self, name, tool) for name, tool in self._tools.items()]

    async def reset(self, task: Task, seed: int) -> Reset:
        """Read the row's arguments and, with `lifetime: episode`, create an instance of each tool. Shows nothing.

        Raises:
            AdapterError: the row has arguments for a tool that is not in the YAML, or arguments that nothing uses.
        """
        self._kwargs = self._of(task)
        self._data = AgentData(request_id=uuid.uuid4().hex, tools_kwargs=self._kwargs)
        if self._lifetime == "episode":
            for name, tool in self._tools.items():
                self._instances[name] = self._data.request_id  # released also where `create` fails
                self._instances[name] = await self._created(name, tool)
        return Reset()

    async def call(self, name: str, arguments: dict[str, Any], view: EpisodeView) -> ToolReply:
        """Call a tool as verl's loop does.

        Raises:
            ToolAnswerError: the tool answered in another form than verl documents, or its release failed.
        """
        tool, instance = self._tools[name], self._instances.get(name)
        self._data.update(view)
        try:
            if self._lifetime == "call":
                instance = await self._created(name, tool)
            answer = await tool.execute(instance, arguments, **self._kwargs_of(name)["execute"])
        except AdapterError:
            raise
        except Exception as error:  # noqa: BLE001  (the model gets verl's message)
            return self._reply(tool, f"Error executing tool '{name}': {error}", 0.0, {})
        finally:
            if self._lifetime == "call" and instance is not None:
                await self._release(name, tool, instance)
        form = "(response, reward, metrics)"
        return self._reply(tool, *parts_of(answer, form, f"{type(tool).__name__}.execute", ToolAnswerError))

    async def score(self, view: EpisodeView) -> list[RewardEvent]:
        """With `lifetime: episode`, the reward of each tool's instance, named after the tool.

        Raises:
            AdapterError: a reward is not a finite number.
        """
        rewards = []
        for name, instance in self._instances.items():
            who = f"{type(self._tools[name]).__name__}.calc_reward"
            value = await self._tools[name].calc_reward(instance, **self._kwargs_of(name)["calc_reward"])
            rewards.append(RewardEvent(name=name, value=reward_of(value, who), cause=who))
        return rewards if view.turn >= 0 else []

    async def close(self) -> None:
        """Release the instances that are there."""
        while self._instances:
            name, instance = self._instances.popitem()
            await self._release(name, self._tools[name], instance)

    async def _created(self, name: str, tool: Any) -> str:
        """The id of a new instance: what `create` returned, alone or with a response.

        Raises:
            ToolAnswerError: it returned none.
        """
        ids = () if self._lifetime == "call" else (self._data.request_id,)
        answer = await tool.create(*ids, **self._kwargs_of(name)["create"])
        instance = answer[0] if isinstance(answer, tuple | list) and answer else answer
        if not isinstance(instance, str) or not instance:
            form = "(instance_id, response)"
            raise ToolAnswerError(f"{type(tool).__name__}.create must return {form}, not {answer!r:.120}")
        return instance

    async def _release(self, name: str, tool: Any, instance: str) -> None:
        try:
            await tool.release(instance, **self._kwargs_of(name)["release"])
        except Exception as error:
            raise ToolAnswerError(f"{type(tool).__name__}.release raised {type(error).__name__}: {error}") from error

    def _kwargs_of(self, name: str) -> dict[str, dict[str, Any]]:
        """The keyword arguments of each method of a tool."""
        row = self._kwargs.get(name, {})
        if self._lifetime == "episode":
            return {key.removesuffix("_kwargs"): dict(row.get(key) or {}) for key in KWARGS}
        return {
            "create": {"create_kwargs": dict(row.get("create_kwargs") or {})},
            "execute": {"agent_data": self._data, **(row.get("execute_kwargs") or {})},
            "release": dict(row.get("release_kwargs") or {}),
        }

    def _of(self, task: Task) -> dict[str, dict[str, Any]]:
        """The row's arguments, by tool."""
        if field_of(task.fields, "extra_info.tool_selection"):
            raise AdapterError(
                f"the row of task `{task.id}` has `extra_info.tool_selection`, which cannot be done: give the row a "
                "field `tools` with the schemas of its tools"
            )
        rows: Mapping[str, Any] = next((value for place in self._places if (value := field_of(task.fields, place))), {})
        by_tool: dict[str, dict[str, Any]] = {}
        for name, row in rows.items():
            if row is None:
                continue  # a column of Parquet has the same keys in each row
            if name not in self._tools:
                names = ", ".join(f"`{name}`" for name in self._tools)
                raise AdapterError(
                    f"the row of task `{task.id}` has arguments for the tool `{name}`; the YAML has {names}"
                )
            stray = [key for key, value in row.items() if value and key not in KWARGS]
            if self._lifetime == "call" and row.get("calc_reward_kwargs"):
                stray = ["calc_reward_kwargs"]
            if stray:
                raise AdapterError(
                    f"the row of task `{task.id}` has `{stray[0]}` for the tool `{name}`, which nothing uses"
                    + ("; `calc_reward` is called with `lifetime: episode`" if stray[0] in KWARGS else "")
                )
            by_tool[name] = dict(row)
        return by_tool

    def _reply(self, tool: Any, response: Any, reward: Any, metrics: Any) -> ToolReply:
        """A tool's answer as the engine's: images first, then the text, as verl shows them."""
        who = f"{type(tool).__name__}.execute"
        if isinstance(response, str) or response is None:
            response = {"text": response}
        plain = response if isinstance(response, Mapping) else {
            key: getattr(response, key, None) for key in ("text", "image", "video")
        }  # fmt: skip
        if plain.get("video"):
            raise ToolAnswerError(f"{who} gave a video; only text and images can be shown")
        try:
            parts: list[ContentPart] = [image_part(item) for item in plain.get("image") or [] if item is not None]
            value = None if reward is None else reward_of(reward, who)
            facts = facts_of(metrics, who) if isinstance(metrics, Mapping) else {}
        except (TypeError, AdapterError) as error:
            raise ToolAnswerError(str(error)) from error
        text = plain.get("text") or ""
        if parts and text:
            parts.append(TextPart(text=text))
        if value is not None:
            self._data.tool_rewards.append(value)
        rewards = [] if value is None else [
            RewardEvent(name=REWARD, value=value, part=PartAddress(call="this"), cause=who)
        ]  # fmt: skip
        return ToolReply(content=parts or text, rewards=rewards, facts=facts)


class VerlTool(DescribedTool):
    """One tool of verl, as the engine calls tools."""

    def __init__(self, tools: VerlTools, name: str, tool: Any) -> None:
        shown = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)["function"]
        parameters = shown.get("parameters") or {"type": "object", "properties": {}}
        super().__init__(name, shown["description"], parameters, tools.call, takes_view=True)
        self._view = VIEW
        self._tools = tools

    async def __call__(self, **arguments: Any) -> ToolReply:
        """Call it."""
        view = arguments.pop(VIEW)
        return await self._tools.call(self.name, arguments, view)


class AgentData:
    """What verl's loop gives to `execute` as `agent_data`: the part of it that the engine has.

    Token ids, log-probs and decoded images are not there; a tool that reads them fails the episode.
    """

    def __init__(self, request_id: str = "", tools_kwargs: Mapping[str, Any] | None = None) -> None:
        self.request_id = request_id
        self.tools_kwargs = dict(tools_kwargs or {})
        self.messages: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] = {}
        self.extra_fields: dict[str, Any] = {}
        """For the tools: kept during the episode."""
        self.tool_rewards: list[float] = []
        self.turn_scores: list[float] = []
        self.user_turns = 0
        self.assistant_turns = 0

    def update(self, view: EpisodeView) -> None:
        """Take over what was said since the last call."""
        self.messages = [as_chat(message) for message in view.messages]
        self.user_turns, self.assistant_turns = view.user_turn, view.turn + 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ToolAnswerError(f"a tool reads `agent_data.{name}`, which exists only inside of verl")


def _native(file: Path) -> tuple[dict[str, Any], ...]:
    """The entries of a tool YAML.

    Raises:
        AdapterError: it is no tool YAML, or a tool is not a class.
    """
    listed = entries(file, "tools")
    for number, item in enumerate(listed):
        if not isinstance(item.get("class_name"), str):
            raise AdapterError(f"`{file.name}`: tool {number} has no `class_name`")
        kind = (item.get("config") or {}).get("type", "native")
        if kind != "native":
            hint = "; name the server in the spec: `tools: [{adapter: mcp, use: …}]`" if kind == "mcp" else ""
            raise AdapterError(f"`{file.name}`: tool {number} has the type `{kind}`, and only `native` runs here{hint}")
    return listed


def _tool(item: Mapping[str, Any], base: str) -> Any:
    """A tool of an entry.

    Raises:
        AdapterError: it is no tool.
        EntryError: its class cannot be imported.
    """
    module, _, attribute = str(item["class_name"]).replace(":", ".").rpartition(".")
    with verl_importable():
        described = item.get("tool_schema")
        try:
            schema = None if described is None else schema_class().model_validate(described)
        except ValueError as error:
            raise AdapterError(f"the `tool_schema` of `{item['class_name']}` is not valid: {error}") from None
        tool = load_entry(f"{module}:{attribute}", Path(base))(
            config=dict(item.get("config") or {}), tool_schema=schema
        )
    lacking = [name for name in ("create", "execute", "calc_reward", "release") if not hasattr(tool, name)]
    if lacking:
        raise AdapterError(f"`{item['class_name']}` is not a tool of verl: it has no `{lacking[0]}`")
    return tool


def _check(method: Any, *arguments: Any, **named: Any) -> None:
    """Refuse a method that verl's loop could not call: there, each call would show the model the same error.

    Raises:
        AdapterError: its signature does not fit.
    """
    try:
        inspect.signature(method).bind(*arguments, **named)
    except TypeError as error:
        raise AdapterError(
            f"`{method.__qualname__}` cannot be called as verl's loop calls it ({error}); add `**kwargs`, or write "
            "`lifetime: episode` for a tool that was written for verl before 0.6"
        ) from None
