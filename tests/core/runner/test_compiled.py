"""Episodes are built in one place, so an option of the spec has the same effect wherever they run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.runner.replay import Replayer
from engine.schemas.generation import GenerateRequest

ROOT = Path(engine.__file__).parent
BUILT_IN = {
    "CompiledSpec": ["episode/compiled.py"],
    "Conversation": ["episode/compiled.py", "tokens/conversation.py"],
    "Episode": ["episode/compiled.py"],
    "Executor": ["plugins/scenarios/play.py", "runner/runner.py"],
    "Journal": [],
    "ServiceInputs": ["plugins/scenarios/play.py", "runner/runner.py"],
    "journal_class": ["store/store.py"],
}
"""Where the constructor of each class is called. A journal is built by `RunStore.journal_class`."""


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_noun_is_built_in_few_places(name: str) -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.rglob("*.py"))
        if f"{name}(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and name == (node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None))
    }
    assert sorted(found) == [place for place in BUILT_IN[name] if (ROOT / place).exists()]  # a plugin may be gone


async def test_a_replayed_episode_has_the_seeds_of_its_run(
    make_spec: Any, run_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.backends.scripted import ScriptedBackend

    asked: list[int | None] = []
    generate = ScriptedBackend.generate

    async def recorded(self: ScriptedBackend, request: GenerateRequest) -> Any:
        asked.append(request.seed)
        return await generate(self, request)

    monkeypatch.setattr(ScriptedBackend, "generate", recorded)
    ran = await run_spec(make_spec(["42"], rollout={"seed": 7, "salt": 5}, machine="single_turn", tools=None))
    replayer = Replayer(ran.loaded, ran.template, ran.store)
    try:
        episode = await replayer.rebuild(ran.store.task("a"), 0, ran.store.journal("a/0"), upto=0)
    finally:
        replayer.close()
    assert asked == [episode.turn_seed(episode.turn + 1)]
