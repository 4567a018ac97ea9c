"""TRL: completions with ids, as a `rollout_func` returns them and as `GRPOTrainer` prepares them, and its logs of
texts.

Three forms:

- a dict of lists with `prompt_ids` and `completion_ids` (JSON, or `torch.save`), as a `rollout_func` returns; or one
  such record for each row (JSON lines, Parquet);
- the tensors of `GRPOTrainer._generate_and_score_completions` (`torch.save`): the same names as tables, with
  `prompt_mask` and `completion_mask`;
- the Parquet files of `log_completions`: `prompt`, `completion`, one column for each reward function, `advantage`. They
  hold texts only.

The loss mask is `completion_mask` times `tool_mask` (or `env_mask`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine.errors import AuditError
from engine.plugins.audit.files import ForeignDocument
from engine.plugins.audit.rows import (
    Columns,
    ForeignRow,
    Vector,
    aligned,
    ids_of,
    messages_of,
    number,
    size_of,
    text_of,
    vector,
)

_LOGPROBS = ("logprobs", "sampling_per_token_logps")
_MASKS = ("env_mask", "tool_mask")
_READ = frozenset(
    (*_LOGPROBS, *_MASKS, "prompt_ids", "completion_ids", "prompt_mask", "completion_mask", "prompt", "prompts",
     "completion", "completions",
     "reward", "rewards", "pixel_values", "image_grid_thw", "num_generations", "old_per_token_logps",
     "ref_per_token_logps")
)  # fmt: skip


def read(document: ForeignDocument) -> list[ForeignRow]:
    """Read a file of TRL.

    Raises:
        AuditError: It is not of TRL's form.
    """
    name = document.path.name
    if document.lines:
        return [_record(row, f"{name} row {at}", {}) for at, row in enumerate(document.value)]
    value = document.value
    if not isinstance(value, dict):
        raise AuditError(f"{document.path}: not a dict with `prompt_ids` and `completion_ids`")
    columns = Columns(value, str(document.path))
    columns.need("prompt_ids", "completion_ids")
    count = columns.count("completion_ids")
    by_row = {key: item for key, item in value.items() if size_of(item) == count}
    shared = {key: item for key, item in value.items() if key not in by_row}
    size = shared.get("num_generations")
    rows = []
    for at in range(count):
        row = {key: item[at] for key, item in by_row.items()}
        if isinstance(size, int) and size > 0 and "group" not in row:
            row["group"] = at // size
        rows.append(_record(row, f"{name} row {at}", shared))
    return rows


def _record(row: Any, place: str, shared: Mapping[str, Any]) -> ForeignRow:
    columns = Columns(row, place)
    prompt = columns.get("prompt", columns.get("prompts"))
    completion = columns.get("completion", columns.get("completions"))
    group = columns.get("group")
    if group is None and "completion" in columns and "completion_ids" not in columns:
        group = f"{columns.get('step', '')}:{prompt}"
    fields = {key: item for key, item in row.items() if key not in _READ and key != "group"}
    texts = ForeignRow(
        place=place,
        group="" if group is None else str(group),
        messages=messages_of(prompt),
        prompt_text=text_of(prompt),
        response_text=text_of(completion),
        reward=_reward(columns, fields),
        images="pixel_values" in shared or "pixel_values" in columns or "images" in columns,
        fields=fields,
    )
    if "completion_ids" not in columns:
        columns.need("prompt", "completion")
        return texts
    columns.need("prompt_ids")
    prompt_ids, _ = _unpadded(columns, "prompt_ids", "prompt_mask", place)
    ids, unpadded = _unpadded(columns, "completion_ids", "completion_mask", place)
    return replace(
        texts,
        prompt_ids=prompt_ids,
        response_ids=ids,
        loss_mask=_column(columns, _MASKS, unpadded, np.int32, place),
        logprobs=_column(columns, _LOGPROBS, unpadded, np.float32, place),
        row_versions=tuple(int(each) for each in [number(columns.get("model_version"))] if each is not None),
    )


def _unpadded(columns: Columns, name: str, mask: str, place: str) -> tuple[Vector, Vector]:
    """Ids without padding, and which elements of the padded row they are."""
    padded = vector(columns.get(name), np.int64, f"{place}: {name}")
    mask_values = aligned(columns.get(mask), len(padded), np.int32, f"{place}: {mask}")
    unpadded = np.ones(len(padded), bool) if mask_values is None else mask_values != 0
    return ids_of(padded[unpadded], f"{place}: {name}"), unpadded


def _column(
    columns: Columns, names: tuple[str, ...], unpadded: Vector, dtype: type[np.generic], place: str
) -> Vector | None:
    for name in names:
        if name in columns:
            column, tokens = vector(columns.get(name), dtype, f"{place}: {name}"), int(unpadded.sum())
            if len(column) not in (len(unpadded), tokens):
                raise AuditError(f"{place}: {name} has {len(column)} elements; the completion has {tokens} tokens")
            return column[unpadded] if len(column) == len(unpadded) else column
    return None


def _reward(columns: Columns, fields: Mapping[str, Any]) -> float | None:
    """The reward: `reward` or `rewards`; else the sum of the columns of reward functions, whose names end with
    `_reward` or `reward_func`."""
    for name in ("reward", "rewards"):
        if name in columns:
            return number(columns.get(name))
    parts = [number(value) for key, value in fields.items() if key.endswith(("_reward", "reward_func", "_func"))]
    return sum(part for part in parts if part is not None) if parts else None
