"""A spec on the scripted backend with one task, and what a test changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from book_kit import BOOK
from ended_runs import Ran, run_to_end
from written_specs import save_spec, scripted_spec


def changed_spec(folder: Path, tokenizer: Path, replies: Any, name: str = "spec", **changes: Any) -> Path:
    """Write the spec. A key that is None is left out, a mapping is merged."""
    spec: dict[str, Any] = {
        **scripted_spec(name, tokenizer, replies, [{"id": "a"}]),
        "tools": [{"use": f"code_for_tests:{tool}"} for tool in ("add", "wait", "explode", "hang", "pay")],
        "user": {"use": "code_for_tests:Critic"},
        "rollout": {"seed": 7},
    }
    for key, value in changes.items():
        if value is None:
            spec.pop(key, None)
        elif isinstance(value, dict) and isinstance(spec.get(key), dict) and key != "user":
            spec[key] = spec[key] | value
        else:
            spec[key] = value
    return save_spec(folder / f"{name}.yaml", spec)


async def book_played(
    folder: Path, tokenizer: Path, replies: list[Any], *, condensing: bool = False, **changes: Any
) -> Ran:
    """Run one episode that reads pages of a book under a short context, and return what ran."""
    (folder / "book.py").write_text(BOOK)
    limits: dict[str, Any] = {"episode_tokens": 1300, "turn_tokens": 60, "assistant_turns": 40}
    limits |= {"on_overflow": "condense"} if condensing else {}
    base: dict[str, Any] = {
        "user": None,
        "prompt": [{"role": "user", "content": "Read the book."}],
        "tools": [{"use": "book:read"}],
        "machine": "tools",
        "limits": limits | changes.pop("limits", {}),
    }
    return await run_to_end(changed_spec(folder, tokenizer, replies, **(base | changes)), folder / "runs")
