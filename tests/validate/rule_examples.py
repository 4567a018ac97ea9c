"""The examples on the pages of rules, as specs that `engine validate` reads."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from engine.errors import SpecError
from engine.spec.load import read_spec
from engine.spec.tasks import load_tasks
from engine.spec.text.diagnostic import Diagnostic
from engine.validate.check import BROKEN
from engine.validate.examine import FAILED, STOPPED, Options, examine
from engine.validate.registry import Page, page_ids, page_of
from engine.validate.worst_case import read_budget

REST = {
    "spec": "spec: episode/v1",
    "name": "name: demo",
    "model": "model: {path: org/m}",
    "tasks": 'tasks: {source: inline, rows: [{question: "What is 2 + 2?"}]}',
    "prompt": 'prompt: [{role: user, content: "{{question}}"}]',
    "machine": "machine: single_turn",
}
"""What an example leaves out."""
WHOLE = {"spec.empty", "spec.missing-key"}
"""Rules whose bad example lacks something that must not be filled in."""
ELSEWHERE = {
    BROKEN,
    "backend.no-experts",
    "backend.no-launcher",
    "machine.too-large",
    "model.calls-not-read",
    "tasks.not-read",
    "train.expert-routing",
    "train.no-package",
    "train.plan",
    "code.no-package",
    "condense.no-package",
    "notify.no-package",
    "report.no-package",
    "role.no-player",
    "traces.no-package",
    STOPPED,
    FAILED,
}
"""Rules whose bad example would fill pages, or depends on what is installed; they have tests of their own."""
BAD = sorted(set(page_ids()) - {"spec.unreadable"} - ELSEWHERE)
"""Rules whose bad example breaks them here."""


_FENCE = re.compile(r"^```(?P<language>\w+)(?: (?P<name>\S+))?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def write(page: Page, section: str, folder: Path, *, whole: bool) -> Path:
    """Write the example under `## Bad` or `## Good` into a folder, completed with what it leaves out unless it is
    `whole`; the path of its spec. Files of `Bad` also belong to `Good`, unless it replaces them."""
    parts = re.split(r"^## (.+)$", page.text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    fences = list(_FENCE.finditer(sections[section]))
    spec = next(fence["body"] for fence in fences if fence["language"] == "yaml" and not fence["name"])
    beside = [] if section == "Bad" else list(_FENCE.finditer(sections.get("Bad", "")))
    given = {match[1] for match in re.finditer(r"^(\w+):", spec, re.MULTILINE)}
    rest = [] if whole else [line for key, line in REST.items() if key not in given]
    (folder / "spec.yaml").write_text("\n".join([*rest, spec]), encoding="utf-8")
    for name, body in {fence["name"]: fence["body"] for fence in [*beside, *fences] if fence["name"]}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(body, encoding="utf-8")
    return folder / "spec.yaml"


def findings(page: Page, file: Path, *more: str) -> list[Diagnostic]:
    """What a spec breaks, when it is validated as the page says, or with other arguments, and when its tasks are
    read."""
    called = re.search(r"^    engine validate SPEC (.+)$", page.text, re.MULTILINE)
    arguments = more or (tuple(called[1].split()) if called else ())
    pairs = list(pairwise(arguments))
    overrides = [value for flag, value in pairs if flag == "--set"]
    trainer = next((value for flag, value in pairs if flag == "--trainer"), None)
    most = read_budget([value for flag, value in pairs if flag == "--budget"])
    options = Options(overrides, budget=most, imports="--import" in arguments, trainer=trainer)
    diagnostics = list(examine(file, options).diagnostics)
    loaded, _ = read_spec(file, overrides)
    if loaded is not None:
        try:
            load_tasks(loaded)
        except SpecError as error:
            diagnostics += error.diagnostics
    return diagnostics


def page(rule: str) -> Page:
    found = page_of(rule)
    assert found is not None
    return found
