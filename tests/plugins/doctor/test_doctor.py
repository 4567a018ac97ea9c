"""`engine doctor`: each thing that stops a run on a machine is found, with what to install or change."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from written_specs import save_spec

from engine.cli.main import app
from engine.plugins.doctor.examine import GIB, Examined, check
from engine.plugins.doctor.facts import Gpu, MachineFacts, SGLangInstall, cudnn_release, release, sglang_of
from engine.spec.load import load_spec

H200 = Gpu("NVIDIA H200", 139 * GIB, 138 * GIB)
GOOD = MachineFacts(
    python=(3, 12),
    cpus=16,
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    cudnn=(9, 20),
    gpus=(H200, H200),
    driver="580.1",
    shared_memory=64 * GIB,
    open_files=65536,
    peft=True,
)
SGLANG = SGLangInstall("/s/python", "0.5.23", flags=frozenset({"--mem-fraction-static", "--dtype"}))


def spec(tmp_path: Path, **changes: Any) -> Any:
    written: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "here",
        "model": {"path": "tiny-qwen2"},
        "backend": {"kind": "sglang", "launch": {"gpus": 2, "tp": 1}},
        "tasks": {"source": "inline", "rows": [{"q": "a"}]},
        "prompt": [{"role": "user", "content": "{{q}}"}],
        "rollout": {"out": str(tmp_path / "runs")},
    }
    file = save_spec(tmp_path / "spec.yaml", written | changes)
    return load_spec(file)


def problems(
    machine: MachineFacts, loaded: Any = None, sglang: SGLangInstall | None = None, size: int | None = None
) -> list[str]:
    found = check(Examined(machine, loaded, sglang, size))
    assert all(bool(finding.fix) == (finding.level != "ok") for finding in found), found
    return [
        f"{finding.level} {finding.about}: {finding.text} → {finding.fix}" for finding in found if finding.level != "ok"
    ]


def test_a_good_machine_has_no_problems(tmp_path: Path) -> None:
    assert problems(GOOD) == []
    assert problems(GOOD, spec(tmp_path), SGLANG, 4 * GIB) == []


@pytest.mark.parametrize(
    ("train", "gpus", "level", "words"),
    [
        ({}, (H200,), "ok", "computes in mixed on cuda (`train.precision: auto`)"),
        ({}, (), "ok", "computes in float32 on cpu (`train.precision: auto`)"),
        ({"device": "cpu"}, (H200,), "ok", "computes in float32 on cpu"),
        ({"precision": "bfloat16"}, (H200,), "ok", "computes in bfloat16 on cuda (`train.precision: bfloat16`)"),
        ({"precision": "float32"}, (), "ok", "computes in float32 on cpu"),
        ({"precision": "float32"}, (H200,), "warning", "without its tensor cores (TF32 is off)"),
        ({"precision": "float32", "device": "cuda:1"}, (H200, H200), "warning", "without its tensor cores"),
    ],
)
def test_the_precision_on_the_device_that_a_training_gets(
    train: dict[str, Any], gpus: tuple[Gpu, ...], level: str, words: str, tmp_path: Path
) -> None:
    machine = dataclasses.replace(GOOD, gpus=gpus)
    loaded = spec(tmp_path, backend={"kind": "local"}, train=train)
    (found,) = [finding for finding in check(Examined(machine, loaded)) if finding.about == "precision"]
    assert found.level == level
    assert words in found.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": None}, "error torch: torch is not installed"),
        ({"torch": "2.13.0+cpu", "torch_cuda": None, "gpus": ()}, "an NVIDIA driver (580.1), and torch is a CPU build"),
        (
            {"gpus": (), "cuda_error": "CUDA driver version is insufficient"},
            "torch finds no GPU: CUDA driver version is insufficient",
        ),
        ({"gpus": (), "driver": None}, "torch finds no GPU: there is no NVIDIA driver"),
        ({"torch": "2.9.1+cu128", "cudnn": (9, 10)}, "cuDNN 9.10: conv3d"),
        ({"npu": True}, "NPUs are not supported"),
        ({"loopback": "permission denied"}, "no port of 127.0.0.1 can be opened: permission denied"),
        ({"shared_memory": 64 * 2**20}, "warning shared memory: 0.062 GiB free"),
        ({"gpus": (Gpu("A", 80 * GIB, 2 * GIB),)}, "another process uses it"),
    ],
)
def test_problems_of_a_machine_are_found(changes: dict[str, Any], message: str) -> None:
    found = problems(dataclasses.replace(GOOD, **changes))
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize("changes", [{"torch": "2.9.1+cu128", "cudnn": (9, 16)}, {"torch": "2.8.0", "cudnn": (9, 10)}])
def test_other_releases_of_torch_and_cudnn_are_fast(changes: dict[str, Any]) -> None:
    assert problems(dataclasses.replace(GOOD, **changes)) == []


LAUNCH = {
    "kind": "sglang",
    "launch": {"gpus": [0, 1], "tp": 2, "args": ["--mem-fraction-statik", "0.8", "--dtype=float16"]},
}


@pytest.mark.parametrize(
    ("machine", "changes", "sglang", "size", "message"),
    [
        ({"gpus": (H200,)}, {}, SGLANG, None, "error GPU: `backend.launch.gpus` names GPU 1, and torch finds 1"),
        ({}, {}, SGLangInstall("/s/python", error="it is not installed"), None, "/s/python -m pip install 'sglang>=0.5.23'"),
        ({}, {}, SGLangInstall("/s/python", "0.5.5"), None, "error SGLang: 0.5.5: it does not say which prompt"),
        ({}, {"backend": LAUNCH}, SGLANG, None, "no argument `--mem-fraction-statik` of `backend.launch.args` → did you mean `--mem-fraction-static`?"),
        ({}, {}, SGLANG, 200 * GIB, "the weights take 200 GiB, and 1 GPU of a server have 139"),
        ({"shared_memory": GIB // 2}, {"backend": LAUNCH | {"launch": {"gpus": 2, "tp": 2}}}, SGLANG, None, "error shared memory"),
        ({"open_files": 256}, {}, SGLANG, None, "warning open files: at most 256; 768 may be needed"),
        ({"peft": False}, {"train": {"lora": {}}}, SGLANG, None, "`train.lora` needs peft → pip install"),
        ({}, {"train": {}}, SGLANG, 10**15, "error disk"),
        ({"system": "Darwin"}, {}, SGLANG, None, "`backend.launch` starts servers on Linux, not on Darwin"),
    ],
)  # fmt: skip
def test_problems_of_a_spec_on_a_machine_are_found(
    tmp_path: Path,
    machine: dict[str, Any],
    changes: dict[str, Any],
    sglang: SGLangInstall,
    size: int | None,
    message: str,
) -> None:
    found = problems(dataclasses.replace(GOOD, **machine), spec(tmp_path, **changes), sglang, size)
    assert [line for line in found if message in line], found


def test_servers_of_urls_are_asked(tmp_path: Path) -> None:
    loaded = spec(tmp_path, backend={"kind": "sglang", "urls": ["http://127.0.0.1:9"]})
    [found] = problems(GOOD, loaded)
    assert found.startswith("error server: http://127.0.0.1:9 does not answer")


def test_releases_are_read_as_torch_writes_them() -> None:
    assert [cudnn_release(number) for number in (91002, 91600, 8907, 92000)] == [(9, 10), (9, 16), (8, 9), (9, 20)]
    assert release("2.9.1+cu128") == (2, 9, 1)
    assert release("0.5.23.post1") == (0, 5, 23)


def test_sglang_is_looked_for_in_the_named_environment(tmp_path: Path) -> None:
    assert sglang_of("/no/such/python", {}, flags=False).error is not None
    fake = tmp_path / "python"
    fake.write_text(
        "#!/bin/sh\n"
        'case "$*" in *importlib*) echo "a warning of a library"; echo 0.5.24;; *--help*) echo "usage: [--dtype {auto}] [--tp-size N]";; esac\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    found = sglang_of(str(fake), {}, flags=True)
    assert (found.version, found.error) == ("0.5.24", None)
    assert found.flags == {"--dtype", "--tp-size"}
    import importlib.util

    if importlib.util.find_spec("sglang") is None:
        assert sglang_of(sys.executable, {}, flags=False).error == "it is not installed"


def test_the_command_prints_what_it_found_and_fails_on_errors(tmp_path: Path) -> None:
    good = CliRunner().invoke(app, ["doctor", "--json"])
    rows = [json.loads(line) for line in good.output.splitlines()]
    assert {row["about"] for row in rows} >= {"system", "torch", "GPU", "disk", "ports"}
    assert good.exit_code == (1 if any(row["level"] == "error" for row in rows) else 0)
    spec(tmp_path, backend={"kind": "sglang", "launch": {"gpus": 0, "python": "/no/such/python"}})
    bad = CliRunner().invoke(app, ["doctor", str(tmp_path / "spec.yaml")], env=os.environ | {"COLUMNS": "300"})
    assert bad.exit_code == 1
    assert "SGLang" in bad.output
    assert "backend.launch.python" in bad.output
    assert CliRunner().invoke(app, ["doctor", str(tmp_path / "missing.yaml")]).exit_code == 1
