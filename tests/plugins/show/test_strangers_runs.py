"""Commands that look at a run of a stranger import nothing that it names, and open nothing beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import engine_apart
from typer.testing import CliRunner

from engine.cli.main import app

MODULES = {
    "planted_credit": "def last(group, **more):\n    return [[0.0] * (e.ledger.turns - 1) + [7.0] for e in group]\n",
    "planted_calls": "from engine.tokens.toolcalls import HermesFormat\nclass Calls(HermesFormat):\n    pass\n",
    "planted_scorer": "from engine.schemas.reward import RewardEvent\ndef score(view):\n    return [RewardEvent(value=1.0)]\n",
    "planted_tools": 'def add(a: int, b: int) -> int:\n    """Add.\n\n    Args:\n        a: One.\n        b: Other.\n    """\n    return a + b\n',
    "planted_tasks": "def rows():\n    return [{'id': 'a', 'question': 'Why?'}]\n",
    "planted_environment": "from engine.schemas.environment import Reset\nclass World:\n    def reset(self, task, seed):\n        return Reset()\n",
}
MARK = "import os\nopen(os.environ['MARKER'], 'a').write(__name__ + ' ')\n"
SHADOWED = [
    "numpy",
    "rich",
    "PIL",
    "pyarrow",
    "tokenizers",
    "transformers",
    "jinja2",
    "orjson",
    "starlette",
    "typing_extensions",
]
"""Modules that commands import late; the stranger's folder has its own of these names."""
WATCH = """
import json, os, sys
outside, theirs = [], os.getcwd()
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if path == os.environ["TEMPLATE"] or path.startswith(theirs) and not path.startswith((theirs + "/runs/", theirs + "/tokenizer/")):
            outside.append(path)
    if event.startswith("socket.connect") or event == "socket.getaddrinfo":
        outside.append(event)
sys.addaudithook(hook)
from engine.cli.main import main
try:
    main()
finally:
    with open(os.environ["OUTSIDE"], "w") as file:
        json.dump(outside, file)
"""
LOOKS = {
    "list": "show RUN",
    "list as JSON": "show RUN --json --sort reward --text Why",
    "filtered list": "show RUN --filter outcome.reward>0",
    "episode": "show RUN a/0",
    "tokens": "show RUN a/0 --tokens",
    "tokens as JSON": "show RUN a/0 --tokens --json",
    "page": "view RUN --export out.html",
    "rows": "export RUN -o out.jsonl",
    "rows with another credit": "export RUN -o out.jsonl --credit method=turn_return",
    "Parquet": "export RUN -o out.parquet",
    "SFT": "export RUN --format sft -o out.jsonl",
    "TRL": "export RUN --format trl -o out.parquet",
    "verl": "export RUN --format verl -o out.parquet",
    "comparison": "compare RUN RUN",
}
REFUSED = {
    "rows": "planted_credit:last",
    "Parquet": "planted_credit:last",
    "TRL": "planted_calls:Calls",
    "verl": "planted_calls:Calls",
}
"""The commands that cannot do without code of the run, and which."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """A stranger's folder with a run, moved from where it was recorded, and with other modules than then."""
    folder = tmp_path_factory.mktemp("recorded")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    shutil.copytree(tiny_tokenizer_dir, folder / "tokenizer")
    template = folder.with_name("template.jinja")
    template.write_text((folder / "tokenizer" / "chat_template.jinja").read_text())
    spec = {
        "spec": "episode/v1",
        "name": "planted",
        "model": {"path": "tokenizer", "tool_calls": "planted_calls:Calls", "chat_template": str(template)},
        "backend": {"kind": "scripted", "replies": ["Because."]},
        "tasks": {"source": "python", "use": "planted_tasks:rows", "id": "id"},
        "prompt": [{"role": "user", "content": "{{question}}"}],
        "environment": {"use": "planted_environment:World"},
        "tools": [{"use": "planted_tools:add"}],
        "machine": "tools",
        "rewards": {
            "scorer": {"use": "planted_scorer:score"},
            "credit": {"method": "entry", "use": "planted_credit:last"},
        },
        "limits": {"turn_tokens": 60, "assistant_turns": 2},
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    done = engine_apart("run", "spec.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    moved = folder.with_name("moved")
    folder.rename(moved)
    shutil.rmtree(moved / "__pycache__", ignore_errors=True)
    for name in [*MODULES, *SHADOWED]:
        (moved / f"{name}.py").write_text(MARK + MODULES.get(name, ""))
    return moved


@pytest.fixture
def run(theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The run, with the stranger's folder as the current one."""
    monkeypatch.chdir(theirs)
    monkeypatch.setenv("MARKER", str(tmp_path / "imported"))
    (found,) = (theirs / "runs").iterdir()
    return str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKS)
def test_looking_imports_nothing_and_opens_nothing_beside_the_run(name: str, run: str, tmp_path: Path) -> None:
    script = tmp_path / "engine-command"
    script.write_text(WATCH)
    words = [
        str(tmp_path / word) if word.startswith("out.") else word for word in LOOKS[name].replace("RUN", run).split()
    ]
    template = str(Path.cwd().with_name("template.jinja"))
    env = os.environ | {"OUTSIDE": str(tmp_path / "outside"), "TEMPLATE": template}
    done = subprocess.run([sys.executable, str(script), *words], env=env, capture_output=True, text=True, check=False)
    assert not (tmp_path / "imported").exists()
    renders = [template] if name in ("TRL", "verl") else []
    assert json.loads((tmp_path / "outside").read_text()) == renders
    if name in REFUSED:
        use = REFUSED[name]
        assert done.returncode == 2
        assert (
            f"imports none: it would be {Path.cwd()}/{use.partition(':')[0]}.py. If you trust it: --import {use}"
            in done.stderr
        )
    else:
        assert done.returncode == 0, done.stdout + done.stderr


def test_only_named_code_is_imported(run: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["show", run, "a/0", "--tokens"])
    assert "no advantages: the run names the code `planted_credit:last`" in shown.output
    assert not (tmp_path / "imported").exists()
    shown = CliRunner().invoke(app, ["show", run, "a/0", "--tokens", "--import", "planted_credit:last"])
    assert "+7.0000" in shown.output
    assert (tmp_path / "imported").read_text() == "planted_credit "


def test_an_import_without_effect_is_said(run: str) -> None:
    shown = CliRunner().invoke(app, ["show", run, "--import", "planted_credit:last"])
    assert shown.exit_code == 0
    assert "--import planted_credit:last had no effect: nothing needed this code" in shown.output


@pytest.mark.slow
def test_the_code_of_a_model_s_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.errors import RenderError
    from engine.schemas.model import ModelSpec
    from engine.tokens.loading import load_tokenizer

    monkeypatch.setenv("MARKER", str(tmp_path / "imported"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    model = tmp_path / "model"
    model.mkdir()
    (model / "own.py").write_text(MARK + "class Own: pass\n")
    (model / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", null]}}'
    )
    (model / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    with pytest.raises(RenderError):
        load_tokenizer(ModelSpec(path=str(model)), tmp_path)
    assert not (tmp_path / "imported").exists()
