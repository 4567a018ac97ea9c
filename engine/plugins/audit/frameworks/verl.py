"""verl: `DataProto.save_to_disk`, and the JSON lines of `trainer.rollout_data_dir`.

A `DataProto` of rollouts has `prompts` [rows, prompt] padded on the left, `responses` [rows, response] padded on the
right, `attention_mask` over both, `response_mask`, `rollout_log_probs` and `rm_scores`. The JSON lines hold texts that
were decoded without special
tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import AuditError
from engine.plugins.audit.files import ForeignDocument
from engine.plugins.audit.pickles import Inert, array_of, named, plain, read_torch
from engine.plugins.audit.rows import (
    Columns,
    ForeignRow,
    batch_of,
    ids_of,
    messages_of,
    number,
    size_of,
    text_of,
)

_READ = (
    "uid",
    "raw_prompt",
    "reward_model",
    "turn_scores",
    "tool_rewards",
    "multi_modal_inputs",
    "min_global_steps",
    "max_global_steps",
)


def read(document: ForeignDocument) -> list[ForeignRow]:
    """Read a file of verl.

    Raises:
        AuditError: It is not of verl's form.
    """
    if document.lines or (isinstance(document.value, dict) and "input" in document.value):
        lines = document.value if document.lines else [document.value]
        return [_line(line, f"{document.path.name} line {at}") for at, line in enumerate(lines, 1)]
    if named(document.value, "DataProto"):
        return _proto(document)
    raise AuditError(f"{document.path}: neither a DataProto nor JSON lines with `input`, `output` and `score`")


def _line(line: Any, place: str) -> ForeignRow:
    columns = Columns(line, place)
    columns.need("input", "output")
    group = columns.get("uid") or columns.get("input")
    return ForeignRow(
        place=place,
        group=f"{columns.get('step', '')}:{str(group).rpartition('_')[0] or group}"
        if "uid" in columns
        else f"{columns.get('step', '')}:{group}",
        prompt_text=text_of(columns.get("input")),
        response_text=text_of(columns.get("output")),
        reward=number(columns.get("score")),
        label=columns.get("gts"),
        turn_rewards=_numbers(columns.get("turn_scores")),
        row_versions=_versions({}, 0, columns.get("step")),
        fields={key: value for key, value in line.items() if key not in ("input", "output", "score", "gts")},
    )


def _proto(document: ForeignDocument) -> list[ForeignRow]:
    """The rows of a `DataProto`."""
    path = document.path
    state = document.value.state
    if not isinstance(state, list | tuple) or len(state) != 3:
        raise AuditError(f"{path}: the DataProto has no state of (batch, non_tensor_batch, meta_info)")
    batch, others, meta = state[0], plain(state[1]), plain(state[2])
    tensors = Columns(_tensors(batch, str(path)), str(path))
    tensors.need("prompts", "responses")
    prompts = batch_of(tensors.get("prompts"), f"{path}: prompts")
    responses = batch_of(tensors.get("responses"), f"{path}: responses")
    count, width = len(prompts), prompts.shape[1]
    attention = tensors.get("attention_mask")
    if attention is None:
        raise AuditError(f"{path}: no `attention_mask`, which says where prompts and responses are padded")
    attention = batch_of(attention, f"{path}: attention_mask")
    if attention.shape != (count, width + responses.shape[1]) or len(responses) != count:
        raise AuditError(f"{path}: prompts, responses and attention_mask have other shapes than each other")
    values = Columns(others if isinstance(others, dict) else {}, str(path))
    lists = {name: values.rows(name, count) for name in _READ}
    rest = {key: values.rows(key, count) for key in others if key not in _READ} if isinstance(others, dict) else {}
    step = meta.get("global_steps") if isinstance(meta, dict) else None
    rows = []
    for at in range(count):
        place = f"{path.name} row {at}"
        unpadded = attention[at, width:] != 0
        ids = ids_of(responses[at][unpadded], f"{place}: responses")
        rewards = tensors.tokens("rm_scores", at, unpadded, np.float64, place)
        if rewards is None:
            rewards = tensors.tokens("token_level_scores", at, unpadded, np.float64, place)
        model = lists["reward_model"][at]
        rows.append(
            ForeignRow(
                place=place,
                group=str(lists["uid"][at] or ""),
                prompt_ids=ids_of(prompts[at][attention[at, :width] != 0], f"{place}: prompts"),
                response_ids=ids,
                loss_mask=tensors.tokens("response_mask", at, unpadded, np.int32, place),
                logprobs=tensors.tokens("rollout_log_probs", at, unpadded, np.float32, place),
                row_versions=_versions(lists, at, step),
                token_rewards=rewards,
                reward=None if rewards is None else float(rewards.sum()),
                turn_rewards=(*_numbers(lists["turn_scores"][at]), *_numbers(lists["tool_rewards"][at])),
                messages=messages_of(lists["raw_prompt"][at]),
                label=model.get("ground_truth") if isinstance(model, dict) else None,
                images=bool(lists["multi_modal_inputs"][at]),
                fields={key: column[at] for key, column in rest.items()},
            )
        )
    return rows


def _versions(lists: dict[str, list[Any]], at: int, step: Any) -> tuple[int, ...]:
    numbers = [number(lists[name][at]) for name in ("min_global_steps", "max_global_steps") if name in lists]
    versions = sorted({int(version) for version in numbers if version is not None and version == version})
    return tuple(versions) or ((int(step),) if isinstance(step, int) else ())


def _numbers(value: Any) -> tuple[float, ...]:
    """The numbers of a list; none for anything else."""
    if size_of(value) is None:
        return ()
    return tuple(each for item in value if (each := number(item)) is not None)


def _tensors(batch: Any, place: str) -> dict[str, Any]:
    """The columns of the batch: bytes of `torch.save` of a `TensorDict`, or verl's own form with
    `VERL_DATAPROTO_SERIALIZATION_METHOD=numpy`."""
    if isinstance(batch, bytes):
        columns = read_torch(batch)
        if isinstance(columns, dict):
            return columns
        name = columns.name if isinstance(columns, Inert) else type(columns).__name__
        raise AuditError(
            f"{place}: the batch is a `{name}`; only consolidated TensorDicts are read (tensordict 0.5 or later)"
        )
    if isinstance(batch, list | tuple) and len(batch) == 3 and isinstance(batch[2], dict):
        return {
            key: array_of(np.asarray(data, np.uint8).tobytes(), str(dtype), tuple(shape))
            for key, (dtype, shape, data) in batch[2].items()
        }
    raise AuditError(f"{place}: the DataProto has no batch of tensors")
