"""Files of strangers: nothing in them is executed, what is claimed is checked against the bytes, and damage is an error with the place."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_but

from engine.errors import AuditError
from engine.plugins.audit.audit import read_rows, read_sampled
from engine.plugins.audit.files import find_files, open_document
from engine.plugins.audit.frameworks import FRAMEWORKS
from engine.plugins.audit.pickles import Inert, named, plain, read_pickle, read_torch


class Calls:
    """What a hostile pickle would call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


class Color(Enum):
    RED = "red"


@pytest.mark.parametrize("protocol", slow_but(range(pickle.HIGHEST_PROTOCOL + 1), 0, 2, pickle.HIGHEST_PROTOCOL))
@pytest.mark.parametrize("function", [os.system, eval, exec, os.mkdir, open], ids=lambda each: each.__name__)
def test_no_function_of_a_pickle_is_called(tmp_path: Path, function: Any, protocol: int) -> None:
    mark = tmp_path / "called"
    words = {"system": f"touch {mark}", "eval": f"open({str(mark)!r}, 'w')", "exec": f"open({str(mark)!r}, 'w')"}
    data = pickle.dumps({"rows": [Calls(function, words.get(function.__name__, str(mark)))]}, protocol)
    (record,) = read_pickle(data)["rows"]
    assert isinstance(record, Inert)
    assert record.name.endswith(f".{function.__name__}")
    assert not mark.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"(S'touch {mark}'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch {mark}'\no.",  # OBJ
        b"\x80\x02cos\nsystem\n\x8c\x0ctouch {mark}\x85\x81.",  # NEWOBJ
        b"\x80\x02cos\nsystem\n)\x81}(X\x01\x00\x00\x00aK\x01ub.",  # BUILD
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",  # STACK_GLOBAL
        b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.",
    ],
)
def test_no_instruction_reaches_a_function(tmp_path: Path, code: bytes) -> None:
    mark = tmp_path / "called"
    try:
        found = read_pickle(code.replace(b"{mark}", str(mark).encode()))
    except AuditError:
        found = None
    assert found is None or isinstance(found, Inert)
    assert not mark.exists()


def test_no_module_of_a_pickle_is_imported() -> None:
    data = b"\x80\x02cthis\ns\n)R."
    sys.modules.pop("this", None)
    assert named(read_pickle(data), "s")
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "asks for 1,099,511,627,776 bytes"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".", "not a readable pickle"),
        (b"\x80\x02" + b"]" + b"(" * 3 + b".", "not a readable pickle"),
        (b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.", "tuples or sets as keys"),
        (b"\x80\x02}(" + b")" + b"\x85" * 100_000 + b"K\x01u.", "tuples or sets as keys"),
        (b"\x80\x04\x8f(" + b")" + b"\x85" * 100_000 + b"\x90.", "tuples or sets as keys"),
        (b"\x80\x02K\x01Q.", "refers to data outside"),
        (b"\x80\x02\x82\x01.", "copyreg"),
        (b"\x80\x02" + b"c" + b"a\nb\n0" * 1 + b".", "not a readable pickle"),
        (b"", "not a readable pickle"),
    ],
)
def test_a_claim_that_the_bytes_do_not_hold_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(AuditError, match=words):
        read_pickle(data)


def test_large_memo_numbers_take_no_memory() -> None:
    assert read_pickle(b"\x80\x02]r" + struct.pack("<I", 0xFFFFFFFF) + b".") == []


def test_lists_that_refer_to_each_other_stay_small() -> None:
    nested: Any = [1, "a"]
    for _ in range(60):
        nested = [nested, nested]  # 2**60 values, if each were copied
    assert plain(read_pickle(pickle.dumps(nested)))[0] is not None
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(AuditError, match="nested more than 64 deep"):
        plain(read_pickle(pickle.dumps(deep)))


@settings(max_examples=20)
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_pickle_gives_an_error_or_a_value(place: int, byte: int, cut: bool) -> None:
    rows = {
        "uid": np.array(["a", None], dtype=object),
        "n": np.arange(3),
        "status": Color.RED,
        "rows": [{"a": 1.5, "b": [True]}] * 2,
    }
    data = bytearray(pickle.dumps(rows))
    place %= len(data)
    data = data[:place] if cut else data
    if not cut:
        data[place] = byte
    try:
        plain(read_pickle(bytes(data)))
    except AuditError:
        pass


def test_values_of_pickles_are_read_as_they_are() -> None:
    rows = {
        "objects": np.array([{"role": "user"}, None], dtype=object),
        "numbers": np.arange(6, dtype=np.int64).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "names": np.array(["ab", "c"]),
        "scalar": np.float32(1.5),
        "ordered": OrderedDict(b=1, a=2),
        "member": Color.RED,
    }
    found = plain(read_pickle(pickle.dumps(rows)))
    assert found["objects"] == [{"role": "user"}, None]
    for name in ("numbers", "columns", "names"):
        np.testing.assert_array_equal(found[name], rows[name])
    assert (found["scalar"], found["ordered"], found["member"]) == (1.5, {"b": 1, "a": 2}, "red")


# --- torch.save -----------------------------------------------------------------------------------------


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8],
)
def test_tensors_are_those_that_torch_reads(dtype: torch.dtype) -> None:
    base = torch.arange(24).reshape(4, 6).to(dtype)
    value = {
        "whole": base,
        "turned": base.T,
        "part": base[1:3, ::2],
        "none": base[:0],
        "one": base[0, 1],
        "list": [base, {"a": None}],
    }
    found = read_torch(saved(value))
    for name in ("whole", "turned", "part", "none", "one"):
        tensor = value[name].float() if dtype == torch.bfloat16 else value[name]  # type: ignore[attr-defined]
        np.testing.assert_array_equal(found[name], tensor.numpy())
    assert found["list"][1] == {"a": None}


def changed(data: bytes, change: Any) -> bytes:
    """A file of torch.save with another pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return buffer.getvalue()


def test_a_tensor_beyond_its_storage_is_refused() -> None:
    data = saved({"ids": torch.arange(200)})  # 200 elements: BININT1 200, in the shape
    with pytest.raises(AuditError, match="reaches beyond its 200 stored elements"):
        read_torch(changed(data, lambda content: content.replace(b"K\xc8\x85", b"K\xc9\x85")))


def test_a_torch_file_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "called"
    data = saved({"samples": [Calls(os.mkdir, str(mark))]})
    assert read_torch(data) == {"samples": [str(mark)]}  # the argument, as of a member of an enumeration
    assert not mark.exists()


def test_an_archive_that_unpacks_to_much_more_is_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(AuditError, match="would unpack to 10,000,000"):
        read_torch(buffer.getvalue())
    with pytest.raises(AuditError, match=r"not a readable file of torch\.save"):
        read_torch(b"PK\x03\x04 and nothing more")


# --- files and forms ------------------------------------------------------------------------------------


def test_the_form_of_a_file_is_found_by_its_first_bytes(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    from safetensors.numpy import save_file

    rows = [{"prompt": "a", "ids": [1, 2]}, {"prompt": "b", "ids": [3]}]
    lines = tmp_path / "any.name"
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert open_document(lines)[1:] == (rows, True)
    (tmp_path / "one.jsonl").write_text(json.dumps(rows[0]))
    assert open_document(tmp_path / "one.jsonl")[1:] == (rows[:1], True)
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(rows, indent=1))
    assert open_document(whole)[1:] == (rows, False)
    table = tmp_path / "table"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    assert open_document(table)[1:] == (rows, True)
    save_file({"input_ids": np.arange(3)}, tmp_path / "t")
    np.testing.assert_array_equal(open_document(tmp_path / "t").value["input_ids"], np.arange(3))
    (tmp_path / "nan.jsonl").write_text('{"score": NaN}\n{"score": Infinity}\n')
    assert [str(row["score"]) for row in open_document(tmp_path / "nan.jsonl").value] == ["nan", "inf"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"rows", "none of JSON, JSON lines, Parquet"),
        (b'{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        (b"{", "not JSON"),
        (b"PAR1 and no more", "not a readable Parquet file"),
        (b"\x80\x04", "not a readable pickle"),
        (b"PK\x03\x04", "not a readable file of torch.save"),
        (b"\x10\0\0\0\0\0\0\0{" + b" " * 30, "not a readable safetensors file"),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "rows"
    path.write_bytes(content)
    with pytest.raises(AuditError, match=words) as caught:
        open_document(path)
    assert str(path) in str(caught.value)


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.pt"
    with path.open("wb") as file:
        file.truncate((2 << 30) + 1)  # a hole: no space on the disk
    with pytest.raises(AuditError, match="at most 2,147,483,648 are read"):
        open_document(path)


def test_files_of_a_folder_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("10.jsonl", "9.jsonl", "notes.txt", "last.pt"):
        (tmp_path / name).write_text("")
    assert [path.name for path in find_files([tmp_path])] == ["9.jsonl", "10.jsonl", "last.pt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(AuditError, match="no file of rows"):
        list(find_files([tmp_path / "empty"]))


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(-2, 2) | st.sampled_from(["", "stop", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)
KEYS = [
    "input",
    "output",
    "score",
    "prompts",
    "responses",
    "prompt_ids",
    "completion_ids",
    "completion_mask",
    "env_mask",
    "logprobs",
    "num_generations",
    "samples",
    "tokens",
    "response_length",
    "loss_mask",
    "prompt_token_ids",
    "response_ids",
    "loss_masks",
    "rewards",
    "stop_reasons",
    "trajectory_ids",
    "input_ids",
    "attention_mask",
    "versions",
    "prompt",
    "completion",
    "reward",
    "step",
]


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
@settings(max_examples=8)
@given(
    document=st.dictionaries(st.sampled_from(KEYS), ANY, max_size=6)
    | st.lists(st.dictionaries(st.sampled_from(KEYS), ANY, max_size=5), max_size=3)
)
def test_any_document_gives_rows_or_an_error_with_the_file(
    tmp_path_factory: pytest.TempPathFactory, framework: str, document: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(document))
    try:
        rows = read_rows(framework, [path])
    except AuditError as error:
        rows, words = [], str(error)
    assert rows or "any.json" in words
    for row in rows:
        assert row.response_ids is None or len(row.mask) == len(row.response_ids)


def test_a_record_of_the_sampler(tmp_path: Path) -> None:
    path = tmp_path / "sampled.jsonl"
    path.write_text('{"output_ids": [1, 2]}\n{"output_ids": [3]}\n')
    assert [ids.tolist() for ids in read_sampled(path)] == [[1, 2], [3]]
    path.write_text('{"output_ids": [1]}\n{"output": [3]}\n')
    with pytest.raises(AuditError, match=r"sampled\.jsonl line 2: no `output_ids`; it has output"):
        read_sampled(path)
