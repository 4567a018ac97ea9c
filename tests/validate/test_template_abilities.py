"""What `engine validate` says of a chat template is what the chat format finds: both ask engine/tokens/template.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_kit import PLAIN, TEMPLATES, make_tokenizer

from engine.schemas.model import ModelSpec
from engine.spec.load import load_spec
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate
from engine.tokens.toolcalls import FORMATS
from engine.validate import check_spec
from engine.validate.templates import shown

IN_PARTS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- for part in m.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Takes contents as lists of parts, as templates of vision-language models may."""


def said(source: str, form: ChatTemplate) -> tuple[Any, ...]:
    found = shown(source, form.fast.full.special_tokens_map, trusted=True)
    assert found is not None
    return found.problem, found.tools, found.results


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_validate_says_what_the_chat_format_finds(formats: Callable[..., ChatTemplate], name: str) -> None:
    form = formats(name)
    assert said(TEMPLATES[name], form) == (None, form.knows_tools, form.knows_tool_results)


def test_a_template_that_takes_parts_is_rendered_with_parts(tmp_path: Path) -> None:
    form = load_format(ModelSpec(path=str(make_tokenizer(tmp_path, IN_PARTS))), Path())
    assert said(IN_PARTS, form) == (None, False, True)
    assert form.knows_tool_results is True


@pytest.mark.parametrize(
    ("calls", "stop", "found"),
    [
        *((name, kind.marks[0][1:-1], True) for name, kind in FORMATS.items()),
        *((name, kind.marks[1], False) for name, kind in FORMATS.items()),
        ("plain", "\n\n", False),
    ],
)
def test_a_stop_string_inside_a_mark_of_tool_calls_is_found(tmp_path: Path, calls: str, stop: str, found: bool) -> None:
    make_tokenizer(tmp_path / "model", PLAIN)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "spec.yaml").write_text(
        "spec: episode/v1\nname: demo\n"
        f"model: {{path: model, tool_calls: {calls}, tool_role: user}}\n"
        f"sampling: {{stop: [{stop!r}]}}\n".replace("'\\n\\n'", '"\\n\\n"')
        + "tasks: {source: inline, rows: [{question: hm}]}\n"
        'prompt: [{role: user, content: "{{question}}"}]\n'
        "machine: tools\n"
        'tools: [{use: "engine.environments.tools.calculator:calculate"}]\n'
    )
    ids = [finding.rule for finding in check_spec(load_spec(tmp_path / "spec.yaml"))]
    assert ("model.stop-in-token" in ids) is found
