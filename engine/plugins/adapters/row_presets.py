"""Rows of the data files of other trainers: `tasks.preset`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from engine.schemas.model import PromptField
from engine.schemas.tasks import RowPreset
from engine.spec.rows.row import find


class VerlRows(RowPreset):
    """Rows of a data file of verl's: `prompt`, `reward_model`, `extra_info`. Adds the fields `index`, `tools_kwargs`
    and `interaction_kwargs` (those of `extra_info`), and `ground_truth` (that of `reward_model`)."""

    name: Literal["verl"]
    """The trainer."""
    prompt_key: str = "prompt"
    """The field with the messages: verl's `data.prompt_key`."""
    image_key: str = "images"
    """The field with the images: verl's `data.image_key`."""

    @property
    def conversation(self) -> PromptField:
        """Where the conversation stands, if the spec has no `prompt`."""
        return _lenient(self.prompt_key, self.image_key, None)

    def task_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As verl's `RLHFDataset`."""
        extra = _mapping(fields, "extra_info")
        added = {
            "extra_info": extra,
            "index": extra.get("index", 0),
            "tools_kwargs": extra.get("tools_kwargs") or fields.get("tools_kwargs") or {},
            "interaction_kwargs": extra.get("interaction_kwargs") or fields.get("interaction_kwargs") or {},
        }
        graded, truth = find("reward_model.ground_truth", fields)
        return {**fields, **added} | ({"ground_truth": truth} if graded else {})


class SlimeRows(RowPreset):
    """Rows of a data file of slime's, as its options say. Adds the fields `label` and `metadata` (with the row's
    `tools`)."""

    part_in_path: ClassVar[bool] = True

    name: Literal["slime"]
    """The trainer."""
    input_key: str = "input"
    """The field with the messages, or with a text: `--input-key`."""
    label_key: str | None = None
    """The field with the label: `--label-key`."""
    multimodal_keys: dict[str, str] = Field(default_factory=dict)
    """`{image: FIELD}`: `--multimodal-keys`."""
    metadata_key: str = "metadata"
    """The field with the metadata: `--metadata-key`."""
    tool_key: str | None = "tools"
    """The field with the schemas of tools: `--tool-key`."""

    @field_validator("multimodal_keys")
    @classmethod
    def _only_images(cls, keys: dict[str, str]) -> dict[str, str]:
        other = next((key for key in keys if key != "image"), None)
        if other is not None:
            raise ValueError(f"an episode shows no `{other}`, only text and images; write `{{image: FIELD}}`")
        return keys

    @property
    def conversation(self) -> PromptField:
        """Where the conversation stands, if the spec has no `prompt`."""
        return _lenient(self.input_key, self.multimodal_keys.get("image"), self.tool_key)

    def task_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As slime's `Dataset` (commit 624b824a)."""
        metadata = _mapping(fields, self.metadata_key)
        label = None
        if self.label_key is not None:
            there, label = find(self.label_key, fields)
            if not there:
                raise ValueError(f"there is no field `{self.label_key}`, which `tasks.preset.label_key` names")
        if self.tool_key is not None and fields.get(self.tool_key) is not None:
            metadata = metadata | {"tools": fields[self.tool_key]}
        return {**fields, "label": label, "metadata": metadata}


def _lenient(field: str, images: str | None, tools: str | None) -> PromptField:
    """Rows may lack images and tools, as those trainers allow."""
    return PromptField.model_construct(_fields_set={"field"}, field=field, images=images, tools=tools)


def _mapping(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"`{name}` must be a mapping; it is a {type(value).__name__}")
    return dict(value or {})
