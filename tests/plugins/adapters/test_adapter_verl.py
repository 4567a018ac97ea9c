"""verl's tools run unchanged: the YAML, its classes and the data file, with the observations and rewards of verl's own loop."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from adapters_kit import EPISODES, FAULTY_EVERY, FEW, LONG, run_spec
from slow_cases import slow_after
from stopping import Resumed, content

from engine.errors import AdapterError, EngineError
from engine.plugins.adapters.verl.modules import schema_class, verl_importable
from engine.plugins.adapters.verl.tools import VIEW, AgentData, VerlTools
from engine.schemas.environment import Environment, Task
from engine.schemas.message import ImagePart
from engine.schemas.trajectory import Trajectory

HERE = Path(__file__).parent
GRADE = {
    "type": "function",
    "function": {
        "name": "grade",
        "description": "Says whether an answer is right.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "A number.", "minLength": 1}},
            "required": ["answer"],
        },
    },
}
ITEM = {"class_name": "my_tools.GraderTool", "config": {"type": "native"}, "tool_schema": GRADE}
SHOWN = json.loads(json.dumps(GRADE).replace(', "minLength": 1', ""))
"""What the model is shown: verl drops the keys of a schema that it does not know."""
REPLIES = ['<call>grade(answer="41")</call>', '<call>grade(answer="raise")</call>', '<call>grade(answer="42")</call>', "It is 42."]  # fmt: skip


def write(folder: Path, items: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """A tool YAML, its classes and its data file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    shutil.copy(HERE / "verl_tools_for_tests.py", folder / "my_tools.py")
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": items}))
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def row(index: int = 0, truth: str = "42", **kwargs: Any) -> dict[str, Any]:
    """A row as verl's data preparation writes it (examples/data_preprocess/gsm8k_tool_agent_loop.py)."""
    given = {"create_kwargs": {"ground_truth": truth}, **kwargs}
    return {
        "data_source": "sums",
        "agent_name": "tool_agent",
        "prompt": [{"role": "system", "content": "Use `grade`."}, {"role": "user", "content": f"Say {truth}."}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index, "need_tools_kwargs": True, "tools_kwargs": {"grade": given}},
    }


def document(model: Path, replies: Any = REPLIES, environment: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A spec of verl's tools and data file."""
    return {
        "spec": "episode/v1",
        "name": "verl-tools",
        "model": {"path": str(model), "tool_calls": "plain", "tool_role": "user"},
        "backend": {"kind": "scripted", "replies": replies},
        "tasks": {"source": "parquet", "path": "train.parquet", "preset": "verl", "id": "extra_info.index"},
        "environment": {"adapter": "verl", "use": "tools.yaml", **(environment or {})},
        "machine": "tools",
        **changes,
    }


def went(trajectory: Trajectory) -> tuple[list[str], list[float]]:
    """The observations and the rewards of the calls, in order."""
    said = [message.text for message in trajectory.messages if message.role in ("tool", "user")][1:]
    return said, [posting.delta for posting in trajectory.postings if posting.name == "tool_reward"]


async def _call_tool(tool: Any, tool_args: dict[str, Any], kwargs: dict[str, Any], data: Any) -> tuple[str, float]:
    """The calls of `ToolAgentLoop._call_tool` (verl 0.9.1): the text that the model reads, and the reward."""
    instance = None
    try:
        instance, _ = await tool.create(create_kwargs=kwargs.get("create_kwargs", {}))
        response, reward, _ = await tool.execute(instance, tool_args, agent_data=data)
    except Exception as error:  # noqa: BLE001
        return f"Error executing tool 'grade': {error}", 0.0
    finally:
        if instance:
            await tool.release(instance)
    return response.text or "", reward


def tool_by_hand(folder: Path) -> Any:
    """The tool's object, as verl's registry makes it."""
    sys.path.insert(0, str(folder))
    try:
        with verl_importable():
            sys.modules.pop("my_tools", None)
            from my_tools import GraderTool  # type: ignore[import-not-found]

            return GraderTool(config={"type": "native"}, tool_schema=schema_class().model_validate(GRADE))
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("my_tools", None)


def test_it_fits_its_protocol(tmp_path: Path) -> None:
    write(tmp_path, [ITEM], [row()])

    async def made() -> Any:
        return VerlTools("tools.yaml", str(tmp_path))

    assert isinstance(asyncio.run(made()), Environment)


@pytest.mark.parametrize(
    ("isolation", "answers"),
    slow_after(
        2, product(["thread", "process"], [["42"], ["41", "raise", "42"], ["no", "raise", "raise", "7"]]), several=True
    ),
)
def test_the_episode_is_that_of_verls_loop(
    tmp_path: Path, tiny_tokenizer_dir: Path, answers: list[str], isolation: str
) -> None:
    write(tmp_path, [ITEM], [row()])
    replies = [*(f'<call>grade(answer="{answer}")</call>' for answer in answers), "Done."]
    (episode,) = run_spec(tmp_path, document(tiny_tokenizer_dir, replies, {"isolation": isolation})).values()

    async def by_hand() -> list[tuple[str, float]]:
        tool = tool_by_hand(tmp_path)
        kwargs = row()["extra_info"]["tools_kwargs"]["grade"]
        return [await _call_tool(tool, {"answer": answer}, kwargs, None) for answer in answers]

    expected = asyncio.run(by_hand())
    assert went(episode) == ([text for text, _ in expected], [reward for _, reward in expected])
    assert (episode.outcome.event, episode.outcome.failure) == ("answered", None)
    assert [(posting.turn, posting.call) for posting in episode.postings] == [(n, 0) for n in range(len(answers))]
    assert [message.text for message in episode.messages[:2]] == ["Use `grade`.", "Say 42."]


def test_a_spec_of_fifteen_lines(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    text = f"""\
spec: episode/v1
name: verl-tools
model: {{path: {tiny_tokenizer_dir}, tool_calls: plain, tool_role: user}}
backend: {{kind: scripted, replies: ['<call>grade(answer="42")</call>', It is 42.]}}
tasks: {{source: parquet, path: train.parquet, preset: verl, id: extra_info.index}}
environment: {{adapter: verl, use: tools.yaml}}
machine: tools
"""
    assert len(text.splitlines()) <= 15
    write(tmp_path, [ITEM], [row()])
    (episode,) = run_spec(tmp_path, yaml.safe_load(text)).values()
    assert went(episode) == (["Current parsed answer='42' reward=1.0"], [0.0])


def test_tools_and_an_interaction_in_one_spec(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """As in verl's configurations with both: the interaction answers what calls no tool."""
    shutil.copy(HERE / "interactions_for_tests.py", tmp_path / "my_interactions.py")
    listed = [{"name": "gsm8k", "class_name": "my_interactions.Gsm8kInteraction", "config": {}}]
    (tmp_path / "interactions.yaml").write_text(yaml.safe_dump({"interaction": listed}))
    fields = row()
    fields["extra_info"]["interaction_kwargs"] = {"name": "gsm8k", "query": "Say 42.", "ground_truth": "42"}
    write(tmp_path, [ITEM], [fields])
    user = {
        "use": "engine.plugins.adapters.verl.interactions:Interactions",
        "effects": "replayable",
        "with": {"config": "interactions.yaml"},
    }
    replies = ["It is 41.", '<call>grade(answer="42")</call>', "It is 42."]
    spec = document(tiny_tokenizer_dir, replies, {"isolation": "thread"}, user=user, machine="tools_and_user")
    (episode,) = run_spec(tmp_path, spec).values()
    assert episode.outcome.event == "satisfied"
    assert [turn.rewards for turn in episode.turns] == [
        {"interaction": 0.0},
        {"tool_reward": 0.0},
        {"interaction": 1.0},
    ]


def test_the_schema_is_the_one_that_verl_shows(tmp_path: Path) -> None:
    write(tmp_path, [ITEM, {"class_name": "my_tools.HistoryTool", "config": {"type": "native"}}], [row()])

    async def shown() -> list[dict[str, Any]]:
        return [tool.shape().schema for tool in VerlTools("tools.yaml", str(tmp_path)).tools()]

    history = {"name": "history", "description": "How often it was called.", "parameters": {"type": "object", "properties": {}}}  # fmt: skip
    assert asyncio.run(shown()) == [SHOWN, {"type": "function", "function": history}]


@pytest.mark.parametrize(
    ("lifetime", "calls"),
    [
        (
            "call",
            ["create 42 1", "execute 1 ['agent_data']", "release []"] * 2,
        ),
        ("episode", ["create 42 1", "execute 1 []", "execute 1 []", "release ['hard']"]),
    ],
)
def test_instances_live_for_a_call_or_for_the_episode(
    tmp_path: Path, tiny_tokenizer_dir: Path, lifetime: str, calls: list[str]
) -> None:
    log = tmp_path / "log"
    given = {"calc_reward_kwargs": {"scale": 2.0}, "release_kwargs": {"hard": True}} if lifetime == "episode" else {}
    write(tmp_path, [{**ITEM, "config": {"type": "native", "log": str(log)}}], [row(**given)])
    replies = ['<call>grade(answer="1")</call>'] * 2 + ["Done."]
    (episode,) = run_spec(
        tmp_path, document(tiny_tokenizer_dir, replies, {"with": {"lifetime": lifetime}, "isolation": "thread"})
    ).values()
    assert [line.partition(" ")[2] for line in log.read_text().splitlines()] == calls
    assert [posting.name for posting in episode.postings][2:] == ([] if lifetime == "call" else ["grade"])


@pytest.mark.parametrize(
    ("isolation", "case"),
    slow_after(
        2, product(["thread", "process"], [(["42"], 2.0), (["42", "7"], 0.0), (["7", "42"], 2.0)]), several=True
    ),
)
def test_calc_reward_is_asked_at_the_end(
    tmp_path: Path, tiny_tokenizer_dir: Path, case: tuple[list[str], float], isolation: str
) -> None:
    answers, value = case
    write(tmp_path, [ITEM], [row(calc_reward_kwargs={"scale": 2.0})])
    replies = [*(f'<call>grade(answer="{answer}")</call>' for answer in answers), "Done."]
    environment = {"with": {"lifetime": "episode"}, "isolation": isolation}
    (episode,) = run_spec(tmp_path, document(tiny_tokenizer_dir, replies, environment)).values()
    last = episode.postings[-1]
    assert (last.name, last.turn, last.delta, last.cause) == ("grade", len(answers), value, "GraderTool.calc_reward")
    assert episode.outcome.failure is None


def test_pictures_and_facts_of_a_tool(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Images first, then the text, as verl writes the message. `None` is no reward."""
    write(tmp_path, [ITEM], [row()])

    async def called() -> Any:
        tools = VerlTools("tools.yaml", str(tmp_path))
        await tools.reset(Task(id="a", index=0, fields=row()), 0)
        view: Any = SimpleNamespace(messages=[], user_turn=0, turn=0)
        return await tools.tools()[0](**{VIEW: view, "answer": "image"})

    reply = asyncio.run(called())
    assert [part.type for part in reply.content] == ["image", "text"]
    assert isinstance(reply.content[0], ImagePart)
    assert (reply.content[1].text, reply.rewards, reply.facts) == ("a square", [], {"shown": True})


def test_a_tool_reads_the_episode(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    write(tmp_path, [ITEM, {"class_name": "my_tools:HistoryTool", "config": {"type": "native"}}], [row()])
    replies = ["<call>history()</call>", '<call>grade(answer="7")</call>', "<call>history()</call>", "Done."]
    (episode,) = run_spec(tmp_path, document(tiny_tokenizer_dir, replies, {"isolation": "thread"})).values()
    said, rewards = went(episode)
    assert [said[0], said[2]] == ["1 sua []", "2 suatata [0.0, -0.05]"]
    assert rewards == [0.0, -0.05, 0.0]


@pytest.mark.parametrize(
    ("isolation", "case"),
    slow_after(
        2,
        product(
            ["thread", "process"],
            [("shape", "must return (response, reward, metrics)"), ("reward", "the reward 'much'")],
        ),
        several=True,
    ),
)
def test_an_answer_of_another_form_fails_the_episode(
    tmp_path: Path, tiny_tokenizer_dir: Path, case: tuple[str, str], isolation: str
) -> None:
    answer, words = case
    write(tmp_path, [ITEM], [row()])
    replies = [f'<call>grade(answer="{answer}")</call>', "Done."]
    (episode,) = run_spec(tmp_path, document(tiny_tokenizer_dir, replies, {"isolation": isolation})).values()
    failure = episode.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("tool_bad_result", "tool")
    assert words in failure.message


def test_what_exists_only_inside_of_verl_fails_the_episode(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    write(tmp_path, [{"class_name": "my_tools.InsideTool", "config": {"type": "native"}}], [{**row(), "extra_info": {"index": 0}}])  # fmt: skip
    (episode,) = run_spec(
        tmp_path, document(tiny_tokenizer_dir, ["<call>history()</call>", "Done."], {"isolation": "thread"})
    ).values()
    assert episode.outcome.failure is not None
    assert "reads `agent_data.response_ids`" in episode.outcome.failure.message
    with pytest.raises(AttributeError):
        _ = AgentData().__wrapped__


@pytest.mark.parametrize(
    ("item", "lifetime", "words"),
    [
        ({"class_name": "my_tools.OldTool", "config": {}}, "call", "write `lifetime: episode`"),
        ({"class_name": "my_tools.NoTool"}, "call", "it has no `create`"),
        ({"class_name": "my_tools.Grader"}, "call", "did you mean `GraderTool`"),
        ({"class_name": "my_tools.GraderTool"}, "call", "needs `tool_schema` in the YAML"),
        ({**ITEM, "tool_schema": {"type": "function"}}, "call", "is not valid"),
        ({**ITEM, "config": {"type": "mcp"}}, "call", r"tools: \[\{adapter: mcp"),
        ({"config": {}}, "call", "has no `class_name`"),
        (ITEM, "run", "`lifetime` is `call` or `episode`"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(tmp_path: Path, item: dict[str, Any], lifetime: Any, words: str) -> None:
    write(tmp_path, [item], [row()])

    async def made() -> None:
        VerlTools("tools.yaml", str(tmp_path), lifetime)

    with pytest.raises((EngineError, ValueError), match=words):
        asyncio.run(made())


def test_a_tool_of_an_older_verl_runs_for_an_episode(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    write(tmp_path, [{"class_name": "my_tools.OldTool", "config": {}}], [{**row(), "extra_info": {"index": 0}}])
    replies = ["<call>history()</call>", "Done."]
    environment = {"with": {"lifetime": "episode"}, "isolation": "thread"}
    (episode,) = run_spec(tmp_path, document(tiny_tokenizer_dir, replies, environment)).values()
    assert went(episode) == (["heard"], [0.5])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools_kwargs": {"grad": {"create_kwargs": {}}}}, "arguments for the tool `grad`; the YAML has `grade`"),
        ({"tools_kwargs": {"grade": {"calc_reward_kwargs": {"scale": 2}}}}, "with `lifetime: episode`"),
        ({"tools_kwargs": {"grade": {"exec_kwargs": {"a": 1}}}}, "`exec_kwargs` for the tool `grade`, which nothing"),
        ({"extra_info": {"tool_selection": ["grade"]}}, "tool_selection"),
    ],
)
def test_arguments_that_nothing_uses_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    write(tmp_path, [ITEM], [row()])

    async def begun() -> None:
        await VerlTools("tools.yaml", str(tmp_path)).reset(Task(id="a", index=0, fields=fields), 0)

    with pytest.raises(AdapterError, match=words):
        asyncio.run(begun())


def test_keys_of_other_rows_are_not_arguments(tmp_path: Path) -> None:
    """Parquet gives each row the keys of all rows, without values."""
    write(tmp_path, [ITEM], [row()])
    fields = {
        "tools_kwargs": {"grade": {"create_kwargs": {"ground_truth": "1"}, "calc_reward_kwargs": None}, "other": None}
    }

    async def begun() -> None:
        await VerlTools("tools.yaml", str(tmp_path)).reset(Task(id="a", index=0, fields=fields), 0)

    asyncio.run(begun())


def test_verl_is_gone_after_the_import() -> None:
    with verl_importable():
        assert "verl.tools.base_tool" in sys.modules
    assert not [name for name in sys.modules if name.partition(".")[0] == "verl"] or _has_verl()


def _has_verl() -> bool:
    from importlib.util import find_spec

    return find_spec("verl") is not None


LATER = (2, 5)
"""Commits after which an episode is stopped and resumed."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "commits", [LATER, pytest.param(range(1, 20), marks=pytest.mark.exhaustive)], ids=["some", "each"]
)
@pytest.mark.parametrize("lifetime", ["call", "episode"])
async def test_a_resume_calls_the_tools_again(
    tmp_path: Path, tiny_tokenizer_dir: Path, lifetime: str, commits: Sequence[int]
) -> None:
    """`effects: replayable`: stopped after any commit, the episode comes to the same."""
    write(tmp_path, [ITEM], [row()])
    environment = {"with": {"lifetime": lifetime}}
    (tmp_path / "resumed.yaml").write_text(yaml.safe_dump(document(tiny_tokenizer_dir, REPLIES, environment)))
    resumed = Resumed(tmp_path / "resumed.yaml")
    await resumed.run(tmp_path / "whole")
    with resumed.store(tmp_path / "whole") as store:
        (wanted,) = map(content, store.trajectories())
    for commit in commits:
        out = tmp_path / str(commit)
        struck = await resumed.starved(out, commit)
        assert struck or commit > LATER[-1]
        await resumed.run(out)
        with resumed.store(out) as store:
            assert list(map(content, store.trajectories())) == [wanted]
        assert await resumed.differences(out) == []
        if not struck:
            return
    assert commits == LATER, "more than 20 commits"


@LONG
@pytest.mark.slow
def test_episodes_beside_faulty_ones_are_whole(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Whatever 5 % of the calls do, the other episodes are whole."""
    kinds = {"raise": None, "shape": "tool_bad_result", "exit": "tool_crashed", "reward": "tool_bad_result"}
    faults = list(kinds)
    bad = {n: faults[n // FAULTY_EVERY % 4] for n in range(0, EPISODES, FAULTY_EVERY)}
    write(tmp_path, [ITEM], [row(index) for index in range(EPISODES)])
    whole = ['<call>grade(answer="41")</call>', '<call>grade(answer="42")</call>', "Done."]
    cases = [
        {"task": str(n), "replies": [f'<call>grade(answer="{fault}")</call>', *whole[1:]]} for n, fault in bad.items()
    ]
    (tmp_path / "replies.yaml").write_text(yaml.safe_dump({"replies": whole, "cases": cases}))
    spec = document(tiny_tokenizer_dir, "replies.yaml", rollout=FEW)
    episodes = run_spec(tmp_path, spec)
    assert len(episodes) == EPISODES
    for n in range(EPISODES):
        episode, kind = episodes[f"{n}/0"], kinds.get(bad.get(n, ""))
        if kind is None:
            first = (
                "Error executing tool 'grade': no such answer" if n in bad else "Current parsed answer='41' reward=0.0"
            )
            assert went(episode) == (
                [first, "Current parsed answer='42' reward=1.0"],
                [0.0 if n in bad else -0.05, 0.0],
            )
        else:
            assert episode.outcome.failure is not None
            assert episode.outcome.failure.kind == kind


@pytest.mark.slow
@pytest.mark.parametrize("answers", [["41", "raise", "42"], ["42"]])
def test_the_real_loop_of_verl(tmp_path: Path, tiny_tokenizer_dir: Path, answers: list[str]) -> None:
    """`ToolAgentLoop._call_tool` itself, over verl's own registry, gives the same texts and rewards."""
    pytest.importorskip("ray", reason="needs verl")
    loops = pytest.importorskip("verl.experimental.agent_loop.tool_agent_loop", reason="needs verl")
    from verl.experimental.agent_loop.tool_parser import FunctionCall
    from verl.tools.tool_registry import initialize_tools_from_config

    write(tmp_path, [ITEM], [row()])
    replies = [*(f'<call>grade(answer="{answer}")</call>' for answer in answers), "Done."]
    (episode,) = run_spec(tmp_path, document(tiny_tokenizer_dir, replies)).values()

    async def by_verl() -> list[tuple[str, float]]:
        sys.path.insert(0, str(tmp_path))
        tools = {tool.name: tool for tool in initialize_tools_from_config(str(tmp_path / "tools.yaml"))}
        loop = SimpleNamespace(tools=tools, max_tool_response_length=10_000, tool_response_truncate_side="middle")
        kwargs = row()["extra_info"]["tools_kwargs"]
        found = []
        for answer in answers:
            call = FunctionCall(name="grade", arguments=json.dumps({"answer": answer}))
            response, reward, _ = await loops.ToolAgentLoop._call_tool(loop, call, kwargs, SimpleNamespace())
            found.append((response.text, reward))
        sys.path.remove(str(tmp_path))
        return found

    expected = asyncio.run(by_verl())
    assert went(episode) == ([text for text, _ in expected], [reward for _, reward in expected])


@pytest.mark.slow
@pytest.mark.skipif(
    "VERL_SOURCE" not in os.environ, reason="needs VERL_SOURCE: a checkout of verl with verl/tools/gsm8k_tool.py"
)
def test_verls_gsm8k_tool_from_a_checkout(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """verl's own tool, its own YAML, and rows as its own script prepares them."""
    source = Path(os.environ["VERL_SOURCE"])
    item = yaml.safe_load((source / "examples/sglang_multiturn/config/tool_config/gsm8k_tool_config.yaml").read_text())
    write(tmp_path, item["tools"], [
        {**row(), "extra_info": {"index": 0, "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}}}}
    ])  # fmt: skip
    calls = [f'<call>calc_gsm8k_reward(answer="{answer}")</call>' for answer in ("41", "42")]
    spec = document(tiny_tokenizer_dir, [*calls, "#### 42"], {"with": {"path": [str(source)]}})
    (episode,) = run_spec(tmp_path, spec).values()
    assert went(episode) == (
        ["Current parsed answer='41' reward=0.0", "Current parsed answer='42' reward=1.0"],
        [-0.05, 0.0],
    )
