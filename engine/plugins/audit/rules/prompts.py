"""The rule about prompts: is what the model was shown what the chat template renders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.errors import EngineError
from engine.plugins.audit.bridges import bridge_differences
from engine.plugins.audit.examine import Examined
from engine.plugins.audit.findings import Finding
from engine.plugins.audit.rules.base import Evidence, finding_of, first_difference


def prompt_not_template(rows: Sequence[Examined], known: Evidence) -> Iterator[Finding]:
    """Prompts that are not what the chat template renders: the first one, and what stands between two replies."""
    for row in rows:
        assert row.row.prompt_ids is not None
        if not row.prompt_is_rendered:
            at, what = _prompt_difference(row)
            yield finding_of("prompt_not_template", "warning", row, what, at, response=False)
        for difference in bridge_differences(row):
            yield finding_of("prompt_not_template", difference.severity, row, difference.message, difference.token)


def _prompt_difference(row: Examined) -> tuple[int | None, str]:
    """The first token at which a prompt differs from what the template renders, and the words."""
    assert row.row.prompt_ids is not None
    messages = row.messages or row.marks.likely(row.row.prompt_ids)
    if messages is None:
        return 0, "the prompt has no form that the chat template writes for any messages"
    try:
        rendered = row.marks.template.render(messages)
    except EngineError as error:
        return None, f"the chat template refuses the prompt's messages: {error}"
    ids = row.row.prompt_ids.tolist()
    at = first_difference(ids, rendered)
    decode = row.marks.template.decode
    here, there = decode(ids[at : at + 8]), decode(rendered[at : at + 8])
    whose = "the row's messages" if row.messages else "the messages that it spells"
    return (
        at,
        f"for {whose} the template renders {there!r} ({len(rendered)} tokens), and the prompt has {here!r} ({len(ids)} tokens)",
    )
