"""Patches of chat templates with known defects, applied only when a spec asks (`model.template_patches`).

    source, names = patched(source, True)          # every patch that is known for this template
    source, names = patched(source, ["keep-thinking"])

Invariant: a patch changes only templates whose hash it lists, so it never meets a text that it was not tested on.
Patches of one template can be combined.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from engine.errors import RenderError
from engine.schemas.base import Struct


class Patch(Struct, frozen=True, kw_only=True):
    """A patch of some templates."""

    name: str
    about: str
    """The defect, and what the patch changes."""
    hashes: dict[str, str]
    """`template_hash` of each template -> the models that have it."""
    edits: dict[str, str]
    """Text of the template -> what takes its place, wherever it occurs."""


_QWEN3 = {
    "a55ee1b1660128b7": "Qwen3 (2025-05 and later)",
    "87a2728cb8dc9fe4": "Qwen3 (first release)",
}
_KEEP = (
    "The template leaves out the reasoning of replies before the newest question, so each new question begins a "
    "branch. All reasoning stays."
)
_ARGUMENTS = "tool['function']['arguments']"
PATCHES: tuple[Patch, ...] = (
    Patch(
        name="keep-thinking",
        about=_KEEP,
        hashes=_QWEN3,
        edits={"loop.index0 > ns.last_query_index": "reasoning_content"},
    ),
    Patch(
        name="keep-thinking",
        about=f"{_KEEP} The generation prompt of these models opens the reasoning, so every reply is shown with its "
        "markers.",
        hashes={"a4aee8afcf2e0711": "Qwen3.5, thinking", "273d8e0e683b8850": "Qwen3.5, not thinking"},
        edits={"loop.index0 > ns.last_query_index": "true"},
    ),
    Patch(
        name="keep-thinking",
        about=_KEEP,
        hashes={"44f815868bf02fa4": "GLM-4-MoE"},
        edits={"loop.index0 > ns.last_user_index and reasoning_content": "reasoning_content"},
    ),
    Patch(
        name="empty-thinking",
        about="With `template_kwargs: {enable_thinking: false}` the generation prompt has an empty reasoning, which "
        "earlier replies are shown without, so "
        "each turn begins a branch. Earlier replies are shown with it.",
        hashes=_QWEN3,
        edits={
            "'<|im_start|>' + message.role + '\\n' + content }}": (
                "'<|im_start|>' + message.role + '\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is defined "
                "and enable_thinking is false else '') + content }}"
            ),
        },
    ),
    Patch(
        name="orphan-think",
        about="The generation prompt ends with `<think>`, so replies hold only `</think>`, and the template leaves out "
        "their reasoning. Replies are shown as "
        "they were sampled, behind the `<think>` of the prompt.",
        hashes={"56a1447ad31926fd": "DeepSeek-R1-Distill", "563b1ce7d61d50a9": "DeepSeek-R1"},
        edits={
            "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}": (
                "{% if '</think>' in content and not content.startswith('<think>') %}{% set content = '<think>\\n' + "
                "content %}{% endif %}"
            ),
        },
    ),
    Patch(
        name="tool-calls",
        about="The template fails on arguments that are objects, and writes `<｜tool▁calls▁begin｜>` and "
        "`<｜tool▁outputs▁begin｜>` only for the first reply with "
        "calls of a conversation. Arguments are written as JSON, and both marks for each reply.",
        hashes={"563b1ce7d61d50a9": "DeepSeek-R1"},
        edits={
            _ARGUMENTS: f"({_ARGUMENTS} if {_ARGUMENTS} is string else {_ARGUMENTS} | tojson)",
            "'tool_calls' in message %}{%- set ns.is_tool = false -%}": (
                "'tool_calls' in message %}{%- set ns.is_tool = false -%}{%- set ns.is_first = false -%}"
                "{%- set ns.is_output_first = true -%}"
            ),
        },
    ),
)


def template_hash(source: str) -> str:
    """The first 16 hex digits of the SHA-256 of a template, without white space at its ends."""
    return hashlib.sha256(source.strip().encode()).hexdigest()[:16]


def patches_of(source: str) -> list[Patch]:
    """The patches that are known for a template."""
    digest = template_hash(source)
    return [patch for patch in PATCHES if digest in patch.hashes]


def patched(source: str, wanted: bool | Sequence[str]) -> tuple[str, list[str]]:
    """A template with patches.

    Args:
        source: The template, in Jinja.
        wanted: True: all that are known for it; or their names.

    Returns:
        The patched template, and the names of its patches; empty if none is known for this template.

    Raises:
        RenderError: A name is unknown, or is not a patch of this template.
    """
    if wanted is False:
        return source, []
    patches = patches_of(source)
    names = [patch.name for patch in patches]
    for name in () if isinstance(wanted, bool) else wanted:
        if name not in names:
            others = sorted({patch.name for patch in PATCHES})
            why = (
                "is not a patch of this chat template"
                if name in others
                else f"is unknown; the patches are {', '.join(others)}"
            )
            of = f"; those of this template: {', '.join(names)}" if names else "; there is none for this template"
            raise RenderError(f"model.template_patches: `{name}` {why} (hash {template_hash(source)}){of}")
    chosen = [patch for patch in patches if wanted is True or patch.name in wanted]
    for patch in chosen:
        for text, other in patch.edits.items():
            source = source.replace(text, other)
    return source, [patch.name for patch in chosen]
