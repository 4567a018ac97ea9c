"""What people write under `model`, validated: which model speaks, and how conversations become its tokens."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from engine.schemas.base import Contract


class ModelSpec(Contract):
    """Which model speaks, and how conversations become its tokens."""

    path: str = Field(min_length=1)
    """A folder, a hub id, or a name in the catalogue (`engine models` lists it)."""
    revision: str | None = None
    """Hub revision, if `path` is a hub id."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer. Default: that of the model."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template. Relative to the spec."""
    renderer: str = "auto"
    """`auto` or `template`: the model's own chat template renders; or the name of a family in the library `renderers`, which then renders in its place."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, for example `enable_thinking: false`."""
    template_patches: bool | list[str] = False
    """Patches of the chat template's known defects: `true` for all that are known for it, or their names. `engine template MODEL` lists them.
    A server or a program that renders text itself must have the patched template too (`engine template MODEL --patches --write FILE`)."""
    history: Literal["branch", "keep"] = "branch"
    """If the template rewrites history (for example drops old reasoning): begin a new exact branch, or keep the sampled tokens."""
    tool_calls: str = "auto"
    """How calls are written: `auto` (as the chat template writes them; the engine tests which reader reads them back), `hermes`, `plain` (`name(arg=1)` in call tags), `pythonic` (LFM2's), or `package.module:Class` for a `ToolCallFormat` of your own."""
    tool_role: Literal["tool", "user"] = "tool"
    """The role of tool results, for templates without a tool role."""
    hidden_roles: list[Literal["system", "user", "tool"]] = Field(default_factory=list)
    """Roles whose messages the chat template leaves out on purpose, old tool results for example: a new exact branch begins there. Messages of
    other roles are never lost: the episode fails. With `system`, a template that refuses a system message after the first message is not shown it."""
    allow_special: bool = False
    """Whether text of users, tools, environments, task fields and replies that spells a special or other added token (`<|im_end|>`,
    `<think>`) becomes that token. Left out, it is encoded as plain text; the spec's own prompts and the chat template always may."""
    context: int | None = Field(default=None, gt=0)
    """Maximum context length in tokens. Default: read from the model's config."""
    max_images: int | None = Field(default=None, ge=1)
    """Maximum number of images in one conversation; one more fails the episode."""
    max_image_pixels: int = Field(default=33_554_432, ge=1)
    """Most pixels of one image as it comes; a larger one fails the episode. The model's processor scales those below it."""
