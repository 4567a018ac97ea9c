"""reasoning-gym's data sets run unchanged: the same questions and scores as by the library driven by hand."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
import pytest
from adapters_kit import (
    EPISODES,
    FAULTY_EVERY,
    FEW,
    LONG,
    earned,
    expected_failures,
    failures,
    planned_faults,
    run_spec,
    shown,
    spec_of,
)

from engine.errors import AdapterError
from engine.plugins.adapters.reasoning_gym import ReasoningGymEnvironment, problems
from engine.schemas.environment import Environment, EpisodeView, Task
from engine.schemas.message import Message

HERE = Path(__file__).parent
PROBLEMS = "engine.plugins.adapters.reasoning_gym:problems"
needs_library = pytest.mark.skipif(
    find_spec("reasoning_gym") is None,
    reason="reasoning-gym is not installed: pip install 'episode-engine[reasoning-gym]'",
)
RAISING = {"boxnet": "42", "prime_factorization": "zzz"}
"""Data sets whose own scorer raises on this answer."""


def spec(model: Path, datasets: Any, replies: list[str], size: int, use: str = "rows", **with_: Any) -> dict[str, Any]:
    tasks = {"source": "python", "use": PROBLEMS, "with": {"datasets": datasets, "size": size, "seed": 7}, "id": "id"}
    environment = {"adapter": "reasoning_gym", "use": use, "with": with_}
    prompt = [{"role": "user", "content": "{{question}}"}]
    return spec_of(model, environment, [], replies, tasks=tasks, prompt=prompt)


def view(task: Task, reply: str, facts: dict[str, Any]) -> EpisodeView:
    messages = [Message(role="assistant", content=reply)]
    return EpisodeView(
        episode_id="a/0",
        task=task,
        seed=0,
        messages=messages,
        turn=0,
        user_turn=0,
        calls=[],
        malformed=[],
        finish="stop",
        facts=facts,
        rewards=[],
    )


def test_it_fits_its_protocol() -> None:
    assert isinstance(ReasoningGymEnvironment("leg_counting"), Environment)


def test_a_missing_library_says_what_to_install() -> None:
    if find_spec("reasoning_gym") is not None:
        pytest.skip("reasoning-gym is installed")
    with pytest.raises(AdapterError, match=r"needs `reasoning_gym`: pip install 'episode-engine\[reasoning-gym\]'"):
        list(problems("leg_counting"))


@pytest.mark.parametrize("item", [{"nam": "x"}, {"name": "x", "conf": {}}, 3])
def test_a_data_set_in_another_form_is_refused(item: Any) -> None:
    with pytest.raises(AdapterError, match="a data set is a name or"):
        list(problems([item]))


@pytest.mark.adapters
@needs_library
def test_scores_and_questions_are_the_librarys(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Each of several data sets, once right and once wrong."""
    import reasoning_gym

    names = ["basic_arithmetic", "leg_counting", "chain_sum", "word_sorting", "prime_factorization"]
    replies = ["Hm. <answer>5</answer>"]
    episodes = run_spec(tmp_path, spec(tiny_tokenizer_dir, names, replies, 3))
    assert len(episodes) == 15
    for name in names:
        data = reasoning_gym.create_dataset(name, seed=7, size=3)
        for index in range(3):
            episode = episodes[f"{name}-7-{index}/0"]
            assert episode.messages[0].text == data[index]["question"]
            assert earned(episode) == [data.score_answer("5", data[index])]


@pytest.mark.adapters
@needs_library
def test_attempts_sum_to_the_best_score(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """A wrong answer, one without tags, and the right one, with what is said between them."""
    (row,) = problems("leg_counting", size=1, seed=7)
    replies = ["<answer>-1</answer>", "What?", f"<answer>{row['answer']}</answer>"]
    document = spec(tiny_tokenizer_dir, "leg_counting", replies, 1, use="leg_counting", attempts=4)
    (episode,) = run_spec(tmp_path, document).values()
    assert shown(episode) == [
        "That is not right. Try again; attempts left: 3.",
        "Write your answer between <answer> and </answer>. Attempts left: 2.",
    ]
    import reasoning_gym

    data = reasoning_gym.create_dataset("leg_counting", seed=7, size=1)
    first = data.score_answer("-1", data[0])
    assert earned(episode) == [first, 0.0, 1.0 - first]
    assert episode.outcome.solved
    document["environment"]["with"]["attempts"] = 2
    (episode,) = run_spec(tmp_path, document).values()
    assert (len(earned(episode)), episode.outcome.solved) == (2, False)


@pytest.mark.adapters
@needs_library
@pytest.mark.parametrize("name", RAISING)
def test_a_scorer_that_raises_on_an_answer_gives_nothing(tmp_path: Path, tiny_tokenizer_dir: Path, name: str) -> None:
    document = spec(tiny_tokenizer_dir, name, [f"<answer>{RAISING[name]}</answer>"], 1)
    (episode,) = run_spec(tmp_path, document).values()
    assert (episode.outcome.failure, earned(episode)) == (None, [0.0])
    assert "Error: " in episode.facts["scorer_raised"]


@pytest.mark.adapters
@needs_library
def test_every_data_set_makes_the_items_of_its_seed() -> None:
    """All that need no other data set: questions and answers are those of the library, and its own answer can be graded."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    names = sorted(DATASETS.keys() - {"composite", "faulty"})
    assert len(names) == 105
    for name in names:
        data = reasoning_gym.create_dataset(name, seed=7, size=2)
        for index, row in enumerate(problems(name, size=2, seed=7)):
            item = data[index]
            assert (row["question"], row["answer"]) == (item["question"], item["answer"]), name
            env = ReasoningGymEnvironment("rows")
            task = Task(id=row["id"], index=0, fields=orjson.loads(orjson.dumps(row)))
            facts = dict(env.reset(task, 0).facts)
            for answer in (item["answer"] or "1", "0"):
                (event,) = env.step(view(task, f"<answer>{answer}</answer>", facts)).rewards
                try:
                    assert event.value == data.score_answer(answer.strip(), item), name
                except (ValueError, TypeError):
                    assert (name in RAISING, event.value) == (True, 0.0)


@pytest.mark.adapters
@needs_library
@pytest.mark.parametrize("name", ["isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"])
def test_a_row_holds_its_item_where_it_changes_with_the_hash_seed(name: str) -> None:
    assert all("metadata" in row for row in problems(name, size=5, seed=11))


@LONG
@pytest.mark.adapters
@needs_library
def test_episodes_beside_faulty_ones_are_whole(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Whatever 5 % of the items do, the others give what the library gives."""
    import reasoning_gym

    shutil.copy(HERE / "rg_faulty.py", tmp_path)
    replies = ["1", "9"]
    document = spec(tiny_tokenizer_dir, "faulty", [f"<answer>{reply}</answer>" for reply in replies], 1, attempts=2)
    document["environment"] |= {"timeout": 10, "with": {"modules": ["rg_faulty"], "attempts": 2}}
    document["rollout"] = FEW
    faults = planned_faults(["raise", "shape", "score", "exit", "hang"])
    rows = [
        {key: row[key] for key in row if key != "metadata"} | {"config": {"fault": fault}}  # the item is made again
        for row, fault in zip(problems("faulty", size=EPISODES, seed=3, modules=["rg_faulty"]), faults, strict=True)
    ]
    document["tasks"] = {"source": "inline", "rows": rows, "id": "id"}
    episodes = run_spec(tmp_path, document)
    kinds = {
        "raise": "environment_error",
        "shape": "adapter_error",
        "score": "adapter_error",
        "exit": "environment_crashed",
        "hang": "environment_timeout",
    }
    assert failures(episodes) == expected_failures(rows, faults, kinds)
    assert (len(episodes), len(failures(episodes))) == (EPISODES, EPISODES // FAULTY_EVERY)
    data = reasoning_gym.create_dataset("faulty", seed=3, size=EPISODES)
    for index, (row, fault) in enumerate(zip(rows, faults, strict=True)):
        if fault is None:
            scores = [data.score_answer(reply, data[index]) for reply in replies]
            gains = [scores[0]] if scores[0] == 1.0 else [scores[0], max(scores) - scores[0]]
            episode = episodes[f"{row['id']}/0"]
            assert (episode.messages[0].text, earned(episode)) == (data[index]["question"], gains)
