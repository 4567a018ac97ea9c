"""AReaL: the tensors of a workflow (`torch.save` or safetensors of a dict, or a list of such dicts), and the JSON lines
of `rollout.dump_to_file`.

The tensors are tables [rows, tokens] over prompt and response: `input_ids`, `attention_mask`, `loss_mask`, `logprobs`,
`versions` (-1 on tokens that were not sampled), and `rewards` [rows]. The response begins at the first token with loss
mask 1 or with a version. The JSON lines hold texts only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import AuditError
from engine.plugins.audit.files import ForeignDocument
from engine.plugins.audit.rows import Columns, ForeignRow, batch_of, ids_of, number, text_of


def read(document: ForeignDocument) -> list[ForeignRow]:
    """Read a file of AReaL.

    Raises:
        AuditError: It is not of AReaL's form.
    """
    value, name = document.value, document.path.name
    if document.lines or (isinstance(value, dict) and "completion" in value):
        lines = value if document.lines else [value]
        return [_line(line, f"{name} line {at}") for at, line in enumerate(lines, 1)]
    batches = value if isinstance(value, list) else [value]
    if not batches or not all(isinstance(batch, dict) for batch in batches):
        raise AuditError(
            f"{document.path}: neither tensors of a workflow nor JSON lines with `prompt` and `completion`"
        )
    rows: list[ForeignRow] = []
    for at, batch in enumerate(batches):
        place = f"{name} item {at}" if len(batches) > 1 else name
        rows += _batch(Columns(batch, place), place, str(at) if len(batches) > 1 else "")
    return rows


def _line(line: Any, place: str) -> ForeignRow:
    columns = Columns(line, place)
    columns.need("prompt", "completion")
    versions = [number(columns.get(name)) for name in ("head_version", "tail_version")]
    return ForeignRow(
        place=place,
        group=str(columns.get("task_id", "")),
        prompt_text=text_of(columns.get("prompt")),
        response_text=text_of(columns.get("completion")),
        reward=number(columns.get("reward")),
        row_versions=tuple(sorted({int(version) for version in versions if version is not None})),
        fields={key: value for key, value in line.items() if key not in ("prompt", "completion", "reward")},
    )


def _batch(columns: Columns, place: str, trajectory: str) -> list[ForeignRow]:
    """The rows of one dict of tensors."""
    columns.need("input_ids", "loss_mask")
    ids = batch_of(columns.get("input_ids"), f"{place}: input_ids")
    shown = columns.get("attention_mask")
    shown = np.ones_like(ids) if shown is None else batch_of(shown, f"{place}: attention_mask")
    if shown.shape != ids.shape:
        raise AuditError(f"{place}: attention_mask has the shape {list(shown.shape)}, input_ids {list(ids.shape)}")
    rewards = columns.rows("rewards", len(ids))
    groups = columns.rows("group", len(ids), columns.get("task_id", ""))
    rows = []
    for at in range(len(ids)):
        row, unpadded = f"{place} row {at}", shown[at] != 0
        tokens = ids_of(ids[at][unpadded], f"{row}: input_ids")
        mask = columns.tokens("loss_mask", at, unpadded, np.int32, row, "input_ids")
        logprobs = columns.tokens("logprobs", at, unpadded, np.float32, row, "input_ids")
        versions = columns.tokens("versions", at, unpadded, np.int32, row, "input_ids")
        assert mask is not None
        places = np.flatnonzero(mask != 0 if versions is None else (mask != 0) | (versions >= 0))
        start = int(places[0]) if len(places) else len(tokens)
        rows.append(
            ForeignRow(
                place=row,
                group=str(groups[at]),
                trajectory=trajectory,
                prompt_ids=tokens[:start],
                response_ids=tokens[start:],
                loss_mask=mask[start:],
                logprobs=None if logprobs is None else logprobs[start:],
                versions=None if versions is None else versions[start:],
                reward=number(rewards[at]),
                images="multi_modal_input" in columns,
            )
        )
    return rows
