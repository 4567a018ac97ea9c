"""slime: files of `--save-debug-rollout-data`, which are
`torch.save({"rollout_id", "samples": [Sample.to_dict(), …]})`.

`tokens` holds prompt and response, `response_length` says where the response begins, and `loss_mask` covers the
response; None means all ones.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from engine.errors import AuditError
from engine.plugins.audit.files import ForeignDocument
from engine.plugins.audit.rows import Columns, ForeignRow, aligned, ids_of, messages_of, number, text_of

_FINISH: dict[str, Literal["stop", "length", "abort"]] = {
    "completed": "stop",
    "truncated": "length",
    "aborted": "abort",
}
_READ = frozenset(
    [
        "tokens",
        "response_length",
        "loss_mask",
        "rollout_log_probs",
        "weight_versions",
        "prompt",
        "response",
        "reward",
        "status",
        "group_index",
        "index",
        "rollout_id",
        "label",
        "remove_sample",
        "multimodal_inputs",
        "multimodal_train_inputs",
        "rollout_routed_experts",
        "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets",
        "teacher_log_probs",
    ]
)


def read(document: ForeignDocument) -> list[ForeignRow]:
    """Read a file of slime.

    Raises:
        AuditError: It is not of slime's form.
    """
    value = document.value
    samples = value.get("samples") if isinstance(value, dict) else value if document.lines else None
    if not isinstance(samples, list):
        raise AuditError(f"{document.path}: not a file of --save-debug-rollout-data: it has no list `samples`")
    return [_sample(sample, f"{document.path.name} sample {at}") for at, sample in enumerate(samples)]


def _sample(sample: Any, place: str) -> ForeignRow:
    if not isinstance(sample, dict):
        raise AuditError(f"{place}: not a dict of `Sample.to_dict()`")
    columns = Columns(sample, place)
    columns.need("tokens")
    tokens = ids_of(columns.get("tokens"), f"{place}: tokens")
    length = columns.get("response_length", 0)
    if not isinstance(length, int) or not 0 <= length <= len(tokens):
        raise AuditError(f"{place}: response_length is {length!r}, and there are {len(tokens)} tokens")
    split = len(tokens) - length
    reward = columns.get("reward")
    prompt = columns.get("prompt")
    return ForeignRow(
        place=place,
        group="" if columns.get("group_index") is None else str(columns.get("group_index")),
        trajectory="" if columns.get("rollout_id") is None else str(columns.get("rollout_id")),
        prompt_ids=tokens[:split],
        response_ids=tokens[split:],
        loss_mask=aligned(columns.get("loss_mask"), length, np.int32, f"{place}: loss_mask"),
        logprobs=aligned(columns.get("rollout_log_probs"), length, np.float32, f"{place}: rollout_log_probs"),
        row_versions=tuple(
            int(each) for each in columns.get("weight_versions", []) if str(each).lstrip("-").isdecimal()
        ),
        reward=number(reward),
        messages=messages_of(prompt),
        prompt_text=text_of(prompt),
        response_text=text_of(columns.get("response")),
        finish=_FINISH.get(str(columns.get("status"))),
        label=columns.get("label"),
        images="multimodal_inputs" in columns or "multimodal_train_inputs" in columns,
        excluded=bool(columns.get("remove_sample", False)),
        fields={key: item for key, item in sample.items() if key not in _READ and item is not None}
        | ({"reward": reward} if isinstance(reward, dict) else {}),
    )
