"""Rows of other trainers' data files, with the fields that those trainers make of them: `tasks: {preset: verl}`.

Read from verl's `RLHFDataset` and slime's `Dataset` (slime/utils/data.py, commit 624b824a).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.schemas.tasks import SlimeRows, VerlRows
from engine.spec.conversation import RowError
from engine.spec.rows.row_values import find


def preset_fields(fields: Mapping[str, Any], preset: VerlRows | SlimeRows | None) -> dict[str, Any]:
    """A row's fields, and those that the preset adds.

    Raises:
        RowError: a field that the preset needs is not there, or has another form.
    """
    if preset is None:
        return dict(fields)
    return _verl(fields) if preset.name == "verl" else _slime(fields, preset)


def _verl(fields: Mapping[str, Any]) -> dict[str, Any]:
    extra = _mapping(fields, "extra_info")
    made = {
        **fields,
        "extra_info": extra,
        "index": extra.get("index", 0),
        "tools_kwargs": extra.get("tools_kwargs") or fields.get("tools_kwargs") or {},
        "interaction_kwargs": extra.get("interaction_kwargs") or fields.get("interaction_kwargs") or {},
    }
    graded, truth = find("reward_model.ground_truth", fields)
    return made | ({"ground_truth": truth} if graded else {})


def _slime(fields: Mapping[str, Any], preset: SlimeRows) -> dict[str, Any]:
    metadata = _mapping(fields, preset.metadata_key)
    label = None
    if preset.label_key is not None:
        there, label = find(preset.label_key, fields)
        if not there:
            raise RowError(f"there is no field `{preset.label_key}`, which `tasks.preset.label_key` names")
    if preset.tool_key is not None and fields.get(preset.tool_key) is not None:
        metadata = metadata | {"tools": fields[preset.tool_key]}
    return {**fields, "label": label, "metadata": metadata}


def _mapping(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = fields.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise RowError(f"`{name}` must be a mapping; it is a {type(found).__name__}")
    return dict(found or {})
