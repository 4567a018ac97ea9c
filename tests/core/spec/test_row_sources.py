"""Rows are read as a stream and by position; splits, shuffles and limits choose the same rows every time."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from slow_cases import slow_but

from engine.errors import SpecError
from engine.schemas.environment import Task
from engine.spec.load import load_spec
from engine.spec.rows import parquet_rows
from engine.spec.rows.mix import TaskList
from engine.spec.rows.parquet_rows import ParquetRows
from engine.spec.rows.row import Rows
from engine.spec.rows.text_rows import CsvRows, JsonlRows
from engine.spec.tasks import load_tasks, shuffled

pytestmark = pytest.mark.usefixtures("in_folder")

HEAD = "spec: episode/v1\nname: demo\nmodel: {path: org/m}\n"
TEXTS = ["plain", "", 'a "quoted" word', "a, comma", "two\nlines", "\u2028 and \x0b", "ünïcode 图像", "\ttab"]


def tasks(keys: str) -> TaskList:
    Path("s.yaml").write_text(f"{HEAD}tasks: {{{keys}}}\n")
    return load_tasks(load_spec("s.yaml"))


def failure(keys: str) -> str:
    with pytest.raises(SpecError) as caught:
        tasks(keys)
    return str(caught.value)


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    return [{"id": f"r{at}", "text": draw.choice(TEXTS) + str(at)} for at in range(count)]


def jsonl(data: list[Any], path: str) -> Path:
    blank = ["\n" if at % 3 == 0 else "" for at in range(len(data))]
    Path(path).write_text("".join(json.dumps(row) + "\n" + gap for row, gap in zip(data, blank, strict=True)))
    return Path(path)


def csv_file(data: list[dict[str, str]], path: str) -> Path:
    import csv

    with Path(path).open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, list(data[0]), delimiter="\t" if path.endswith(".tsv") else ",")
        writer.writeheader()
        writer.writerows(data)
    return Path(path)


def parquet(data: list[Any], path: str, group: int = 7) -> Path:
    pq.write_table(pa.Table.from_pylist(data), path, row_group_size=group)
    return Path(path)


def opened(path: Path) -> Any:
    return path.open("rb")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "parquet with a large row group"])
def test_any_row_is_the_same_by_position_as_in_the_stream(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two files; quoted line ends, empty lines and a byte order mark do not move a row."""
    first, second = rows(50, 1), rows(23, 2)
    source: Rows
    if kind == "jsonl":
        source = JsonlRows([jsonl(first, "a.jsonl"), jsonl(second, "b.jsonl")], opened)
    elif kind in ("csv", "tsv"):
        source = CsvRows([csv_file(first, f"a.{kind}"), csv_file(second, f"b.{kind}")], opened)
    else:
        if "large" in kind:
            monkeypatch.setattr(parquet_rows, "GROUP_BYTES", 1)
        source = ParquetRows([parquet(first, "a.parquet"), parquet(second, "b.parquet")])
    streamed = list(source)
    assert [row.fields for row in streamed] == first + second
    assert [row.number for row in streamed] == list(range(1, 74))
    assert len(source) == 73
    order = random.Random(3).sample(range(73), 73)
    assert [source.row(at) for at in order] == [streamed[at] for at in order]
    assert list(source) == streamed


@pytest.mark.parametrize(
    "keys", ["source: jsonl, path: a.jsonl", "source: csv, path: a.csv", "source: parquet, path: a.parquet"]
)
def test_tasks_by_index_are_those_of_the_stream(keys: str) -> None:
    data = rows(40)
    jsonl(data, "a.jsonl"), csv_file(data, "a.csv"), parquet(data, "a.parquet")
    table = tasks(f"{keys}, id: id")
    wanted = [Task(id=row["id"], index=at, fields=row) for at, row in enumerate(data)]
    assert table == wanted
    assert [table[at] for at in (39, 0, -1, 7)] == [wanted[at] for at in (39, 0, -1, 7)]
    assert table[3:30:9] == wanted[3:30:9]
    with pytest.raises(IndexError):
        table[40]


@pytest.mark.parametrize("kind", slow_but(["jsonl", "csv", "parquet"], "jsonl"))
def test_rows_of_a_file_are_not_held_in_memory(kind: str) -> None:
    """8 MB of rows are loaded, iterated and read in another order within 1 MB: an index and a few rows."""
    import tracemalloc

    data = [{"id": str(at), "text": f"{at}" + "x" * 4_000} for at in range(2_000)]
    {"jsonl": jsonl, "csv": csv_file, "parquet": parquet}[kind](data, f"a.{kind}")
    del data
    tasks(f"source: {kind}, path: a.{kind}, limit: 2")  # imports are not counted
    loaded = load_spec("s.yaml", ["tasks.id=id", "tasks.shuffle=3", "tasks.limit=null"])
    tracemalloc.start()
    table = load_tasks(loaded)
    assert sum(len(task.fields["text"]) for task in table) > 8_000_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) == 2_000
    assert peak < 1_000_000


def test_a_shuffle_depends_on_its_seed_alone() -> None:
    jsonl(rows(30), "a.jsonl")
    plain = tasks("source: jsonl, path: a.jsonl, id: id")
    mixed = tasks("source: jsonl, path: a.jsonl, id: id, shuffle: 7")
    assert [task.index for task in mixed] == shuffled(30, 7).tolist()
    assert [task.index for task in mixed][:8] == [14, 7, 15, 26, 23, 9, 20, 11]  # for ever: runs are resumed by it
    assert sorted(mixed, key=lambda task: task.index) == list(plain)  # each task is what it is without it
    assert tasks("source: jsonl, path: a.jsonl, id: id, shuffle: 8") != mixed
    assert tasks("source: jsonl, path: a.jsonl, id: id, shuffle: 7, limit: 5") == mixed[:5]


def test_a_shuffle_is_uniform() -> None:
    first = np.array([shuffled(5, seed) for seed in range(4_000)])
    counts = np.array([[(first[:, place] == row).sum() for row in range(5)] for place in range(5)])
    assert np.abs(counts - 800).max() < 130  # five standard deviations


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("[2:5]", [2, 3, 4]), ("[:20%]", [0, 1]), ("[-2:]", [8, 9]), ("[:-8]", [0, 1]), ("[85%:]", [8, 9]), ("train[:1]", [0]),
        ("train", list(range(10))), ("[5:99]", [5, 6, 7, 8, 9]),
    ],
)  # fmt: skip
def test_a_part_of_the_rows(split: str, expected: list[int]) -> None:
    jsonl(rows(10), "a.jsonl")
    assert [task.index for task in tasks(f"source: jsonl, path: a.jsonl, split: '{split}'")] == expected


def test_parts_of_percentages_share_no_row() -> None:
    jsonl(rows(37), "a.jsonl")
    parts = [tasks(f"source: jsonl, path: a.jsonl, split: '[{low}%:{low + 10}%]'") for low in range(0, 100, 10)]
    assert [task.index for part in parts for task in part] == list(range(37))


def test_the_split_of_a_folder() -> None:
    Path("set/data").mkdir(parents=True)
    for name, count in (
        ("train-00000-of-00002", 4),
        ("train-00001-of-00002", 3),
        ("test-00000-of-00001", 2),
        ("trainer", 1),
    ):
        parquet(rows(count, count), f"set/data/{name}.parquet")
    assert len(tasks("source: parquet, path: set, split: train")) == 7
    assert len(tasks("source: parquet, path: set, split: 'train[:2]', shuffle: 1")) == 2
    assert len(tasks("source: parquet, path: set, split: test")) == 2
    assert len(tasks("source: parquet, path: set")) == 10
    assert failure("source: parquet, path: set, split: dev").endswith(
        "error[tasks.split] the folder `set` has no file of the split `dev`; its files: test-00000-of-00001.parquet, "
        "train-00000-of-00002.parquet, train-00001-of-00002.parquet, trainer.parquet"
    )
    assert failure("source: parquet, path: set/data/trainer.parquet, split: test").endswith(
        "error[tasks.split] `trainer.parquet` is one file, so there is no split `test`; name a folder with a file for each split, "
        "or take a part of the rows: `split: '[:90%]'`"
    )
    assert "has no file that ends with .csv or .tsv" in failure("source: csv, path: set")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n1\n", "a.csv:3:1: error[tasks.bad-row] row 2 has 1 values; the first row names 2 columns"),
        ("a,a\n1,2\n", "a.csv:1:1: error[tasks.bad-file] the first row has the column `a` twice"),
        ('a,b\n1,2\n"x,3\n', "a.csv:3:1: error[tasks.bad-row] it is no CSV: unexpected end of data"),
        ("a,b\n", "s.yaml:4:1: error[tasks.empty] the task source has no rows"),
    ],
)
def test_a_bad_csv_file(text: str, words: str) -> None:
    Path("a.csv").write_text(text)
    assert failure("source: csv, path: a.csv").removeprefix(f"{Path.cwd()}/") == words


def test_a_csv_file_that_is_not_utf8() -> None:
    Path("a.csv").write_bytes(b"a\nx\n\xff\n")
    assert failure("source: csv, path: a.csv").endswith("a.csv:3:1: error[tasks.bad-row] it is not UTF-8 (byte 0)")


def test_rows_that_share_an_id_are_found_in_any_order() -> None:
    data = [*rows(20), {"id": "r3", "text": "again"}]
    jsonl(data, "a.jsonl")
    for more in ("", ", shuffle: 5", ", split: '[2:]'"):
        assert "error[tasks.duplicate-id] rows 4 and 21 share the id `r3`" in failure(
            f"source: jsonl, path: a.jsonl, id: id{more}"
        )


def test_a_file_that_changes_during_a_run_is_an_error() -> None:
    jsonl(rows(10), "a.jsonl")
    table = tasks("source: jsonl, path: a.jsonl, shuffle: 1")
    with Path("a.jsonl").open("r+b") as stream:
        stream.write(b'{"id": 5}    ')
    os.utime("a.jsonl", ns=(1, 1))
    with pytest.raises(SpecError, match=r"error\[tasks.bad-file\] the file has changed since its rows were counted"):
        table[3]


@pytest.mark.parametrize("space", [True, False])
def test_a_file_that_is_read_in_another_order_is_decoded_at_most_three_times(
    space: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for more than one row group. With space on the disk the file is copied; without, it is decoded on."""
    data = rows(40)
    pq.write_table(pa.Table.from_pylist(data), "a.parquet", row_group_size=2)
    monkeypatch.setattr(parquet_rows, "KEPT_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**60 if space else 0))
    decoded: list[int] = []
    opened = parquet_rows._parquet_file

    def watched(path: Path) -> Any:
        class Watched(pq.ParquetFile):
            def read_row_group(self, at: int) -> Any:
                decoded.append(at)
                return super().read_row_group(at)

        assert opened(path).num_row_groups == 20
        return Watched(path)

    monkeypatch.setattr(parquet_rows, "_parquet_file", watched)
    source = ParquetRows([Path("a.parquet")])
    order = random.Random(3).sample([*range(40)] * 5, 200)
    assert [source.row(at).fields for at in order] == [data[at] for at in order]
    assert len(decoded) == 40 if space else len(decoded) > 100  # and once more for the copy


def test_row_groups_that_fit_in_memory_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.Table.from_pylist(rows(40)), "a.parquet", row_group_size=2)
    monkeypatch.setattr(parquet_rows, "_copied", lambda file: pytest.fail("it was copied"))
    source = ParquetRows([Path("a.parquet")])
    for at in random.Random(3).sample([*range(40)] * 5, 200):
        assert source.row(at).fields == rows(40)[at]


def test_an_object_with_rows_by_position_is_not_copied() -> None:
    Path("big_rows.py").write_text(
        "class Rows:\n    def __len__(self): return 10**9\n"
        "    def __getitem__(self, at):\n        if at == 3: raise KeyError('gone')\n        return {'n': at}\n"
    )
    table = tasks("source: python, use: 'big_rows:Rows', split: '[-3:]'")
    assert [task.fields["n"] for task in table] == [10**9 - 3, 10**9 - 2, 10**9 - 1]
    assert "`big_rows:Rows` failed at row 4: KeyError: 'gone'" in failure(
        "source: python, use: 'big_rows:Rows', limit: 5"
    )


@pytest.mark.slow
def test_folders_of_the_package_datasets() -> None:
    """One saved with `save_to_disk`, with splits or without; its images stay bytes."""
    saved = pytest.importorskip("datasets")
    from PIL import Image

    picture = Image.new("RGB", (8, 8), "red")
    features = saved.Features({"n": saved.Value("int64"), "images": saved.Sequence(saved.Image())})
    table = saved.Dataset.from_list([{"n": at, "images": [picture]} for at in range(6)], features=features)
    table.save_to_disk("one")
    saved.DatasetDict({"train": table, "test": table.select([5, 2])}).save_to_disk("two")
    assert [task.fields["n"] for task in tasks("source: hub, path: one, shuffle: 1")] == shuffled(6, 1).tolist()
    found = tasks("source: hub, path: two, split: test")
    assert [task.fields["n"] for task in found] == [5, 2]
    assert found[1].fields["images"][0].startswith("data:image/png;base64,iVBOR")
    assert len(tasks("source: hub, path: two, split: 'train[:50%]'")) == 3
