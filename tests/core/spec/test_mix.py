"""Tasks of several sources, mixed by weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from installed_plugins import needs_plugin

from engine.errors import SpecError
from engine.runner.task_order import TaskOrder
from engine.spec.load import LoadedSpec, load_spec
from engine.spec.rows.mix import DRAWS, Draws, mixed_tasks, phase
from engine.spec.rows.text_rows import JsonlRows
from engine.spec.tasks import count_tasks, load_tasks
from engine.validate import check_spec

pytestmark = pytest.mark.usefixtures("in_folder")

WEIGHTS = st.lists(st.floats(0.1, 20.0), min_size=1, max_size=5)


def loaded(tasks: dict[str, Any], **more: Any) -> LoadedSpec:
    spec = {"spec": "episode/v1", "name": "mix", "model": {"path": "org/m"}, "machine": "single_turn", "tasks": tasks}
    Path("s.yaml").write_text(yaml.safe_dump(spec | {"prompt": [{"role": "user", "content": "{{q}}"}]} | more))
    return load_spec("s.yaml")


def write(name: str, count: int) -> dict[str, Any]:
    Path(name).write_text("".join(json.dumps({"q": f"{name} {n}", "key": f"k{n}"}) + "\n" for n in range(count)))
    return {"source": "jsonl", "path": name}


def mix(**sources: Any) -> dict[str, Any]:
    return {"source": "mix", "mix": sources}


def test_every_task_once_in_the_shares_of_the_weights() -> None:
    tasks = load_tasks(loaded(mix(easy=write("easy.jsonl", 5) | {"weight": 2}, hard=write("hard.jsonl", 2))))
    ids = [task.id for task in tasks]
    assert ids == ["easy:0", "hard:0", "easy:1", "easy:2", "hard:1", "easy:3", "easy:4"]
    assert [tasks[at] for at in range(len(tasks))] == list(tasks)
    assert [task.index for task in tasks] == list(range(7))
    assert [task.fields["q"] for task in tasks][:2] == ["easy.jsonl 0", "hard.jsonl 0"]


def test_ids_keys_and_limits_of_sources() -> None:
    """The same id in two sources is two tasks; `id` and `map` hold for each source that has none of its own."""
    easy, hard = write("easy.jsonl", 9), write("hard.jsonl", 9) | {"shuffle": 3, "map": {"q": "key"}, "id": "q"}
    tasks = {"id": "key", "limit": 6, **mix(easy=easy, hard=hard)}
    found = list(load_tasks(loaded(tasks)))
    assert len(found) == len({task.id for task in found}) == 6
    assert [task.id for task in found if task.id.startswith("easy")] == ["easy:k0", "easy:k1", "easy:k2"]
    assert [task.id for task in found if task.id.startswith("hard")] != [f"hard:hard.jsonl {n}" for n in range(3)]
    assert all(set(task.fields) == {"q"} for task in found if task.id.startswith("hard"))
    assert count_tasks(loaded(tasks)) == 6


def test_a_seed_changes_the_order_and_every_launch_has_the_same() -> None:
    def order(shuffle: int | None) -> list[str]:
        sources = {name: {"source": "inline", "rows": [{"q": n} for n in range(20)]} for name in ("a", "b", "c")}
        return [task.id for task in load_tasks(loaded({"shuffle": shuffle, **mix(**sources)}))]

    assert order(1) == order(1)
    assert sorted(order(1)) == sorted(order(2)) == sorted(order(None))
    assert len({tuple(order(seed)) for seed in (None, 1, 2)}) == 3


def test_iterating_reads_each_file_as_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = load_tasks(loaded(mix(easy=write("easy.jsonl", 50) | {"weight": 3}, hard=write("hard.jsonl", 30))))
    wanted = [tasks[at].id for at in range(len(tasks))]
    kept = tasks.chosen(np.array([1, 4, 70]))
    assert [task.index for task in kept] == [1, 4, 70]

    def row(self: Any, position: int) -> Any:
        raise AssertionError("a row was read by its position")

    monkeypatch.setattr(JsonlRows, "row", row)
    assert [task.id for task in tasks] == wanted
    assert [task.id for task in kept] == [wanted[1], wanted[4], wanted[70]]


@settings(max_examples=15, deadline=None)
@given(weights=WEIGHTS, seed=st.none() | st.integers(0, 99), number=st.integers(0, 3 * DRAWS))
def test_endless_draws_have_the_shares_of_the_weights_everywhere(
    weights: list[float], seed: int | None, number: int
) -> None:
    draws = Draws(weights, seed)
    found = [draws[n] for n in range(number, number + 50)]
    for source, weight in enumerate(weights):
        mine = [draw for of, draw in found if of == source]
        assert mine == list(range(mine[0], mine[0] + len(mine))) if mine else True  # its draws in order
        for draw in mine[:1]:
            expected = number * weight / sum(weights)
            assert abs(draw - expected) <= len(weights) + 1
    again = Draws(weights, seed)
    assert [again[n] for n in reversed(range(number, number + 50))] == found[::-1]


def test_endless_draws_begin_as_the_finite_order() -> None:
    weights = [2.0, 1.0, 0.5]
    times = sorted(
        ((draw + phase(7, source)) / weight, source, draw)
        for source, weight in enumerate(weights)
        for draw in range(9000)
    )
    draws = Draws(weights, 7)
    assert [draws[n] for n in range(9000)] == [(source, draw) for _, source, draw in times[:9000]]


def test_a_training_draws_by_weight_with_epochs_of_each_source() -> None:
    tasks = load_tasks(loaded(mix(few=write("few.jsonl", 3) | {"weight": 3}, many=write("many.jsonl", 100))))
    order = TaskOrder(tasks, shuffle=True, seed=5, mix=tasks.mix)
    found = [order[number].id for number in range(40)]
    few = [name for name in found if name.startswith("few")]
    assert len(few) == 30
    assert len(set(found)) == 40
    for epoch in range(10):
        end = f"~{epoch}" if epoch else ""
        assert sorted(few[3 * epoch : 3 * epoch + 3]) == [f"few:{n}{end}" for n in range(3)]
    again = TaskOrder(tasks, shuffle=True, seed=5, mix=tasks.mix)
    assert [again[number].id for number in reversed(range(40))] == found[::-1]


def test_a_source_without_tasks_left_is_not_drawn() -> None:
    tasks = load_tasks(loaded(mix(a=write("a.jsonl", 2), b=write("b.jsonl", 2))))
    left = tasks.chosen(np.array([0, 2]))
    order = TaskOrder(left, shuffle=False, seed=0, mix=left.mix)
    assert [order[number].id for number in range(3)] == ["a:0", "a:1", "a:0~1"]


@pytest.mark.parametrize(
    ("tasks", "rule", "message"),
    [
        (mix(a={"source": "jsonl", "path": "none.jsonl"}), "tasks.unreadable", "in the source `a`: the task file `none.jsonl` does not exist"),
        (
            mix(a={"source": "inline", "rows": [{"q": 1}]}, b={"source": "inline", "rows": [{"q": 1}, {"x": 2}], "map": {"q": "q"}}),
            "tasks.unreadable",
            "in the source `b`: row 2 has no field `q`",
        ),
        (mix(b={"source": "inline", "rows": [{"x": 1}]}), "prompt.unknown-field", "in the source `b`: "),
        (
            mix(b={"source": "python", "use": "nowhere:rows"}),
            "code.import",
            "",
        ),
        (
            mix(b={"source": "inline", "rows": [{"q": 1}], "path": "x"}),
            "tasks.no-effect",
            "`path` has no effect with `source: inline`",
        ),
        (
            {"rows": [{"q": 1}], **mix(b={"source": "inline", "rows": [{"q": 1}]})},
            "tasks.no-effect",
            "`rows` has no effect with `source: mix`",
        ),
    ],
)  # fmt: skip
def test_the_rules_about_tasks_hold_for_each_source(tasks: dict[str, Any], rule: str, message: str) -> None:
    found = [item for item in check_spec(loaded(tasks)) if item.rule == rule]
    assert len(found) == 1
    assert message in found[0].message
    assert found[0].origin.line > 3


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"source": "mix"}, "`source: mix` needs `mix`"),
        ({"source": "mix", "mix": {}}, "not empty|at least 1"),
        ({"split": "[:9]", **mix(a={"source": "inline", "rows": []})}, "`split` belongs to the sources"),
        (mix(a={"source": "inline", "rows": [], "weight": 0}), "greater than 0|above 0"),
        (mix(a={"source": "jsonl"}), "`source: jsonl` needs `path`"),
        (mix(**{"a:b": {"source": "inline", "rows": []}}), "a:b"),
    ],
)
def test_a_mix_that_is_not_valid_is_refused(tasks: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        loaded(tasks)


@needs_plugin("evaluation")
def test_an_evaluation_on_a_source_of_the_training_is_reported() -> None:
    a, b = write("a.jsonl", 2), write("b.jsonl", 2)
    for tasks, rules in ((a, ["train.eval-on-training-tasks"]), (write("c.jsonl", 2), [])):
        spec = loaded(mix(a=a, b=b), train={"eval": {"tasks": tasks}}, rollout={"samples_per_task": 4})
        found = [item.rule for item in check_spec(spec) if item.rule.startswith("train.eval")]
        assert found == rules


def test_sizes_do_not_change_what_was_drawn_before() -> None:
    tables = [list(mixed_tasks({"a": table(size), "b": table(9)}, [1, 2], seed=None, limit=9)) for size in (5, 6)]
    assert [task.id for task in tables[0]] == [task.id for task in tables[1]]


def table(count: int) -> Any:
    rows = [{"q": number} for number in range(count)]
    return load_tasks(loaded({"source": "inline", "rows": rows}))
