"""Generates `docs/rows.md` from `rows.md` beside this file: the columns of rows stand where it has their marks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_BY_TOKEN = (
    "input_ids",
    "loss_mask",
    "logprobs",
    "weight_versions",
    "turn_ids",
    "token_rewards",
    "advantages",
)
_SHAPES = {**dict.fromkeys(_BY_TOKEN, "[tokens]"), "turn_rewards": "[turns]", "routed_experts.shape": "[3]"}


def rows_page() -> str:
    """Return the page."""
    page = Path(__file__).with_name("rows.md").read_text(encoding="utf-8")
    for name, table in {"columns": _columns(), "sft": _sft(), "filter": _filter()}.items():
        page = page.replace(f"<!-- {name} -->", "\n".join(table))
    return page


def _columns() -> list[str]:
    from engine.store.rows.columns import MEANINGS

    types = _types()
    if list(types) != list(MEANINGS):
        raise SystemExit("the columns of `arrow_schema` are not those of `MEANINGS`, in this order")
    lines = [
        f"| `{name}` | {types[name]} | {_SHAPES.get(name, '')} | {meaning} |" for name, meaning in MEANINGS.items()
    ]
    return ["| column | type | shape | meaning |", "|---|---|---|---|", *lines]


def _types() -> dict[str, str]:
    """Return the type of every column in words, such as `list of int32`, by the column's path."""
    import pyarrow as pa

    from engine.store.rows.export import arrow_schema

    types: dict[str, str] = {}

    def visit(path: str, type_: pa.DataType) -> None:
        types[path] = _type_in_words(type_)
        inner = type_.value_type if pa.types.is_list(type_) else type_
        if pa.types.is_struct(inner):
            for field in inner:
                visit(f"{path}.{field.name}", field.type)

    for column in arrow_schema():
        visit(column.name, column.type)
    return types


def _type_in_words(type_: pa.DataType) -> str:
    import pyarrow as pa

    if pa.types.is_list(type_):
        return f"list of {_type_in_words(type_.value_type)}"
    return "struct" if pa.types.is_struct(type_) else str(type_)


def _sft() -> list[str]:
    from engine.plugins.datasets.sft_rows import SFT_MEANINGS

    return ["| column | meaning |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in SFT_MEANINGS.items())]


def _filter() -> list[str]:
    from engine.store.episode_filter import EPISODE, OUTCOME, TURN

    lines = ["| name | type | |", "|---|---|---|"]
    for name, variable in (("outcome", OUTCOME), ("episode", EPISODE), ("turn", TURN)):
        for field, member in variable.fields.items():
            lines.append(f"| `{name}.{field}` | {' or '.join(sorted(member.types))} | {member.doc} |")
    return lines
