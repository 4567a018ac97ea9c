"""SkyRL: a `GeneratorOutput` (pickle, `torch.save` or JSON), and the `TrainingInputBatch` of `trainer.dump_data_batch`.

A `GeneratorOutput` has lists of one entry for each row: `prompt_token_ids`, `response_ids`, `loss_masks`, `rewards` (a
number, or a list by token), `stop_reasons`, `rollout_logprobs`, `trajectory_ids`. A `TrainingInputBatch` has tables:
`sequences` padded on the left, `response_mask`
and `loss_mask` over the last columns.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from engine.errors import AuditError
from engine.plugins.audit.files import ForeignDocument
from engine.plugins.audit.pickles import Inert, array_of, named, plain, read_torch
from engine.plugins.audit.rows import Columns, ForeignRow, aligned, batch_of, ids_of, number, size_of

_FINISH: dict[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}


def read(document: ForeignDocument) -> list[ForeignRow]:
    """Read a file of SkyRL.

    Raises:
        AuditError: It is not of SkyRL's form.
    """
    if named(document.value, "_rebuild_tensor_batch"):
        return _batch(document)
    if not isinstance(document.value, dict) or document.lines:
        raise AuditError(f"{document.path}: neither a GeneratorOutput nor a TrainingInputBatch")
    return _output(document)


def _output(document: ForeignDocument) -> list[ForeignRow]:
    columns = Columns(document.value, str(document.path))
    columns.need("prompt_token_ids", "response_ids", "loss_masks", "rewards")
    count = columns.count("response_ids")
    named_columns = (
        "prompt_token_ids",
        "response_ids",
        "loss_masks",
        "rewards",
        "stop_reasons",
        "rollout_logprobs",
        "trajectory_ids",
    )
    lists = {name: columns.rows(name, count) for name in named_columns}
    images = "pixel_values" in columns
    rows = []
    for at in range(count):
        place = f"{document.path.name} row {at}"
        ids = ids_of(lists["response_ids"][at], f"{place}: response_ids")
        reward = lists["rewards"][at]
        by_token = None
        if size_of(reward) is not None:
            by_token = aligned(reward, len(ids), np.float64, f"{place}: rewards")
        group, repetition = _trajectory(lists["trajectory_ids"][at])
        stop = lists["stop_reasons"][at]
        rows.append(
            ForeignRow(
                place=place,
                group=group,
                trajectory=f"{group}/{repetition}" if group else "",
                prompt_ids=ids_of(lists["prompt_token_ids"][at], f"{place}: prompt_token_ids"),
                response_ids=ids,
                loss_mask=aligned(lists["loss_masks"][at], len(ids), np.int32, f"{place}: loss_masks"),
                logprobs=aligned(lists["rollout_logprobs"][at], len(ids), np.float32, f"{place}: rollout_logprobs"),
                token_rewards=by_token,
                reward=number(reward) if by_token is None else float(by_token.sum()),
                finish=_FINISH.get(str(stop)),
                images=images,
                fields={} if stop is None else {"stop_reason": str(stop)},
            )
        )
    return rows


def _trajectory(value: Any) -> tuple[str, str]:
    """(instance_id, repetition_id) of a `TrajectoryID`: a record of a pickle, a dict, or text `instance_repetition`."""
    if isinstance(value, Inert):
        value = value.state
    if isinstance(value, dict) and "instance_id" in value:
        return str(value["instance_id"]), str(value.get("repetition_id", ""))
    if isinstance(value, str):
        group, _, repetition = value.rpartition("_")
        return (group, repetition) if group and repetition.isdecimal() else (value, "")
    return "", ""


def _batch(document: ForeignDocument) -> list[ForeignRow]:
    """The rows of a `TrainingInputBatch`."""
    path = str(document.path)
    args = document.value.args
    state = args[1] if len(args) == 2 and isinstance(args[1], dict) else {}
    metadata = plain(state.get("metadata"))
    columns = Columns(
        {key: _tensor(value, f"{path}: {key}") for key, value in (state.get("batch_dict") or {}).items()}, path
    )
    columns.need("sequences", "attention_mask", "response_mask", "loss_mask")
    sequences = batch_of(columns.get("sequences"), f"{path}: sequences")
    shown = batch_of(columns.get("attention_mask"), f"{path}: attention_mask")
    responses = batch_of(columns.get("response_mask"), f"{path}: response_mask")
    width = responses.shape[1]
    if shown.shape != sequences.shape or len(responses) != len(sequences) or width > sequences.shape[1]:
        raise AuditError(f"{path}: sequences, attention_mask and response_mask have other shapes than each other")
    uids = metadata.get("uids") if isinstance(metadata, dict) else None
    groups = list(uids) if uids is not None and size_of(uids) == len(sequences) else [""] * len(sequences)
    rows = []
    for at in range(len(sequences)):
        place = f"{document.path.name} row {at}"
        unpadded = responses[at] != 0
        tokens = ids_of(sequences[at][shown[at] != 0], f"{place}: sequences")
        length = int(unpadded.sum())
        rewards = columns.tokens("rewards", at, unpadded, np.float64, place)
        rows.append(
            ForeignRow(
                place=place,
                group=str(groups[at]),
                prompt_ids=tokens[: len(tokens) - length],
                response_ids=tokens[len(tokens) - length :],
                loss_mask=columns.tokens("loss_mask", at, unpadded, np.int32, place),
                logprobs=columns.tokens("rollout_logprobs", at, unpadded, np.float32, place),
                token_rewards=rewards,
                reward=None if rewards is None else float(rewards.sum()),
                images="pixel_values" in columns,
            )
        )
    return rows


def _tensor(value: Any, place: str) -> Any:
    """A tensor in SkyRL's own form: `{format: numpy, data, dtype, shape}`, or `{format: torch, data}`; None for lists
    of tensors."""
    value = plain(value)
    if not isinstance(value, dict) or not isinstance(value.get("data"), bytes):
        return None
    if value.get("format") == "torch":
        return read_torch(value["data"])
    try:
        return array_of(value["data"], str(value["dtype"]), tuple(value["shape"]))
    except (KeyError, TypeError) as error:
        raise AuditError(f"{place} is not a tensor in SkyRL's form ({error})") from error
