"""The format `hermes`, which large models know: JSON between tags.

<tool_call>
{"name": "calculate", "arguments": {"expression": "3 * (4 + 5)"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.tokens.toolcalls.base import Call, TaggedFormat, UnreadableCall, as_arguments

HERMES_FORM = 'Write {"name": "<tool>", "arguments": {...}}.'


class HermesFormat(TaggedFormat):
    """One JSON object with `name` and `arguments` in each pair of tags."""

    name = "hermes"
    marks = ("<tool_call>", "</tool_call>")
    auto = True

    def read_body(self, body: str, tools: Sequence[dict[str, Any]]) -> Call:
        """See `TaggedFormat.read_body`."""
        try:
            value = json.loads(body)
        except json.JSONDecodeError as error:
            raise UnreadableCall(f"It is not valid JSON: {error.msg} at character {error.pos}. {HERMES_FORM}") from None
        except RecursionError:
            raise UnreadableCall(f"Its JSON is nested too deeply. {HERMES_FORM}") from None
        except ValueError:
            raise UnreadableCall(f"Its JSON holds a number of too many digits. {HERMES_FORM}") from None
        if not isinstance(value, dict):
            raise UnreadableCall(f"It is not a JSON object. {HERMES_FORM}")
        name = value.get("name")
        if not isinstance(name, str) or not name:
            raise UnreadableCall(f'It has no "name". {HERMES_FORM}')
        return name, as_arguments(value.get("arguments", value.get("parameters", {})), HERMES_FORM)

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """See `ToolCallFormat.write`."""
        written = (json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls)
        return "\n".join([*([text] if text else []), *(f"<tool_call>\n{call}\n</tool_call>" for call in written)])
