"""Training rows are read by their fields. Their dict, `TrainingRow.columns()`, is read where rows come from a file or go into one."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from training_rows import row_of

import engine
from engine.store.rows.columns import MEANINGS
from engine.store.rows.row import RowCredit, TrainingRow, columns_of
from engine.train.batches import mask_turns
from engine.train.credited_rows import with_last_state
from engine.train.packing import pack_rows

ROOT = Path(engine.__file__).parents[1]
READERS = {
    "engine/store/loader.py": "reads rows of files, and makes batches of rows of files",
    "engine/store/rows/columns.py": "has the meaning of each column",
    "engine/store/rows/export.py": "writes columns to a file or an Arrow stream",
    "engine/store/rows/row.py": "makes the columns",
    "engine/plugins/datasets/sft_rows.py": "makes the columns of rows for supervised fine-tuning",
    "engine/plugins/serve/wire.py": "adds the bytes of images to the columns of an answer",
    "engine/plugins/sft/demonstrations.py": "reads rows of files",
    "engine/plugins/sft/row_facts.py": "reads rows of files",
    "engine/plugins/sft/rendered_rows.py": "reads rows of files that have messages and no ids",
    "engine/plugins/trainers/areal/rows.py": "columns of AReaL's batch",
    "engine/plugins/trainers/verl/agent_loop.py": "columns of verl's data set and batch",
    "engine/plugins/trainers/verl/rows.py": "columns of verl's batch",
}
"""Files that read a training row, or what they call `columns`, by names of columns."""
OTHERS = {
    "engine/plugins/audit/frameworks/trl.py": "rows that TRL made",
    "engine/plugins/sglang/checks.py": "workers of a router",
    "engine/plugins/show/episode_report.py": "columns of a table of tokens",
    "engine/plugins/show/listing/filters.py": "rows of the index of episodes",
    "engine/plugins/adapters/reasoning_gym.py": "problems of a data set",
    "engine/plugins/adapters/verl/interactions.py": "messages of a prompt",
    "engine/tokens/vision_families.py": "tensors of the images of a sequence",
    "environments/geo3k.py": "problems of a data set",
    "environments/search.py": "questions of a data set",
    "bench/condensing.py": "questions of a data set",
    "scripts/demo_report.py": "steps of a training",
}
"""Files that call something else a row or columns."""


NAMED = re.compile(r"\b(row|rows\[.*\]|columns)\[|\brow \|")
"""Lines that may read a row by a key, or merge it."""


def sources() -> Iterator[tuple[str, ast.AST]]:
    """Each node of each file of the engine and of its scripts that may name a row, with the file's path."""
    for folder in ("engine", "schemas", "environments", "scripts", "bench", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if NAMED.search(text):
                name = path.relative_to(ROOT).as_posix()
                yield from ((name, node) for node in ast.walk(ast.parse(text)))


def is_row(node: ast.AST) -> bool:
    """Whether an expression is named as a row or as its columns: `row`, `rows[…]`, `columns`."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Name) and node.value.id == "rows"
    return isinstance(node, ast.Name) and node.id in ("row", "columns")


def is_column(key: ast.expr) -> bool:
    """Whether a key is the name of a column."""
    return isinstance(key, ast.Constant) and key.value in MEANINGS


def named_row(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "row"


def test_rows_are_read_by_fields_except_in_the_readers_of_columns() -> None:
    """A key of `row` or `rows[…]` is a key of something else; of `columns`, it may be that of another trainer's table."""
    found = {
        name
        for name, node in sources()
        if isinstance(node, ast.Subscript)
        and is_row(node.value)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
        and (is_column(node.slice) or not isinstance(node.value, ast.Name) or node.value.id == "row")
    }
    assert found <= READERS.keys() | OTHERS.keys()
    there = {name for name in OTHERS if (ROOT / name).exists()}  # a plugin may be gone
    assert there <= found, "a file that is listed and has no such row"


def test_no_row_is_merged_with_a_dict() -> None:
    merged = [
        (name, node.lineno)
        for name, node in sources()
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and named_row(node.left))
        or (isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr) and named_row(node.target))
    ]
    assert merged == []


def row() -> TrainingRow:
    """Six tokens, of which four in two turns are trained."""
    return row_of(
        input_ids=[5, 6, 7, 8, 9, 10],
        loss_mask=[0, 1, 1, 0, 1, 1],
        turn_ids=[-1, 0, 0, -1, 1, 1],
        advantages=[9.0, 1.0, 2.0, 9.0, 3.0, 4.0],
        logprobs=[0.0, -1.0, -2.0, 0.0, -3.0, -4.0],
    )


def test_columns_are_those_of_the_documentation_in_their_order() -> None:
    assert list(row().columns()) == [name for name in MEANINGS if "." not in name]


def test_arrays_of_the_columns_are_those_of_the_branch() -> None:
    one = row()
    columns = one.columns()
    for name in ("input_ids", "loss_mask", "logprobs", "weight_versions", "turn_ids"):
        assert columns[name] is getattr(one.branch, name), name
    assert columns["advantages"].tolist() == [0, 1, 2, 0, 3, 4]


def test_places_alone_say_what_is_trained() -> None:
    """DAPO's filter takes turn 0 out; a row that was cut has the place of its last state. Neither copies the branch."""
    one = row()
    masked = mask_turns(one, {0})
    assert masked.branch is one.branch
    assert (masked.places.tolist(), masked.advantages.tolist()) == ([4, 5], [3, 4])
    columns = masked.columns()
    assert columns["loss_mask"].tolist() == [0, 0, 0, 0, 1, 1]
    assert columns["advantages"].tolist() == [0, 0, 0, 0, 3, 4]
    assert (columns["loss_mask"].dtype, columns["logprobs"].tolist()) == (np.int32, one.branch.logprobs.tolist())
    cut = with_last_state(replace(one, credit=RowCredit(members={}, needs_values=True, cut=True)))
    assert cut.branch is one.branch
    assert cut.places.tolist() == [1, 2, 4, 5, 6]
    (pack,) = pack_rows([cut], 100, share_prefixes=False)
    assert (pack.input_ids.tolist(), pack.sources.tolist()) == ([5, 6, 7, 8, 9, 10], [0, 1, 3, 4, 5])


def test_a_row_without_advantages_has_none_in_its_columns() -> None:
    assert replace(row(), advantages=np.zeros(0, np.float32)).columns()["advantages"] is None


def test_rows_of_an_episode_share_what_takes_time_to_make() -> None:
    one = row()
    first, second, third = columns_of([one, replace(one, trainable=False), row()])
    assert first["messages"] is second["messages"]
    assert first["messages"] is not third["messages"]
    assert (first["trainable"], second["trainable"]) == (True, False)


def test_a_row_survives_a_pickle() -> None:
    """Process 0 of a training sends rows to the others."""
    one = row()
    again = pickle.loads(pickle.dumps(one))
    assert {name: str(value) for name, value in again.columns().items()} == {
        name: str(value) for name, value in one.columns().items()
    }
