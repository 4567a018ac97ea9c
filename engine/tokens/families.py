"""Known model families, through the library `renderers`: renderers that parse replies by token. To add one: an entry of
`FAMILIES`.

Invariant: for `auto`, the library never renders. The model's chat template renders every prompt, and a family only
*reads* replies, once choosing.py has found that it reads what this template writes. A family that the spec names in
`model.renderer` also renders. It is trusted with that, and its bridges must pass bridge/check.py like a template's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.errors import RenderError
from engine.schemas.model import ModelSpec
from engine.tokens.bridge.kinds import View
from engine.tokens.bridge.wrapper import Bridge
from engine.tokens.jinja_template import find_ends, stand_in_for
from engine.tokens.reply_readers import FamilyReader
from engine.tokens.template import ChatTemplate, reads_template
from engine.tokens.tokenizer import FastTokenizer
from engine.tokens.toolcalls import tool_call_format

_QWEN, _GLM, _DEEPSEEK, _EOS = "<tool_response>", "[gMASK]", "<｜begin▁of▁sentence｜>", "〈|EOS|〉"


FAMILIES = {
    "qwen3": _QWEN,
    "qwen3-vl": _QWEN,
    "qwen3.5": _QWEN,
    "qwen3.6": _QWEN,
    "qwen3.8": _QWEN,
    "prime-qwen3": _QWEN,
    "nemotron-3": _QWEN,
    "nemotron-3-ultra": _QWEN,
    "nemotron-3.5": _QWEN,
    "llama-3": "<|eom_id|>",
    "gemma4": "<|turn>",
    "gpt-oss": "<|channel|>",
    "glm-4.5": _GLM,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.3": _GLM,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v4": _DEEPSEEK,
    "kimi-k2": "<|im_user|>",
    "kimi-k2.5": "<|im_user|>",
    "minimax-m2": "]~!b[",
    "hy3": "<｜hy_begin_of_sentence:opensource｜>",
    "inkling": "<|message_user|>",
    "laguna-xs.2": _EOS,
    "laguna-m.1": _EOS,
    "laguna-xs-2.1": _EOS,
    "laguna-s-2.1": _EOS,
}
"""Families whose readers `auto` tries, in this order, and a token that each cannot do without: the library takes a
second to import, and some families fetch a vocabulary, so a family is not tried on a tokenizer without its token. Only
the test on the template decides (choosing.py)."""


def family_format(
    tokenizer: FastTokenizer, spec: ModelSpec, base: Path, *, vocab_size: int, context: int | None
) -> FamilyTemplate:
    """The family that `model.renderer` names.

    Raises:
        RenderError: The family does not exist, or does not fit the tokenizer or `template_kwargs`.
    """
    names = sorted(set(_registry()) - {"default"})
    if spec.renderer not in names:
        raise RenderError(f"model.renderer: {spec.renderer!r} is unknown; write auto, template or {', '.join(names)}")
    try:
        return FamilyTemplate(spec.renderer, tokenizer, spec, base, vocab_size=vocab_size, context=context)
    except Exception as error:
        raise RenderError(f"model.renderer: {spec.renderer} does not fit this model: {error}") from error


class FamilyTemplate(ChatTemplate):
    """A family of `renderers`, which renders in place of a chat template."""

    def __init__(
        self,
        name: str,
        tokenizer: FastTokenizer,
        spec: ModelSpec,
        base: Path,
        *,
        vocab_size: int,
        context: int | None,
    ) -> None:
        super().__init__(name, tokenizer, spec, vocab_size=vocab_size, context=context)
        self._renderer = make_renderer(name, tokenizer, spec)
        self.stop_token_ids = list(self._renderer.get_stop_token_ids())
        self.reader = FamilyReader(name, self._renderer, tokenizer, self.stop_set)
        self.reads_calls = True
        self._find_abilities()
        self.close_id = find_ends(self)[0]
        if spec.tool_calls != "auto":
            self.call_format = tool_call_format(spec.tool_calls, base)
            self.reads_calls = reads_template(self, self.call_format)

    def render_views(self, views: Sequence[View], tools: list[View] | None) -> list[int]:
        """See `ChatTemplate.render_views`.

        Raises:
            RenderError: the renderer refuses the messages.
        """
        shown = [  # with an image in each image part, as the library reads messages
            {**view, "content": [{**part, "image": _blank()} if part["type"] == "image" else part for part in content]}
            if isinstance(content := view["content"], list)
            else view
            for view in views
        ]
        try:
            return list(self._renderer.render_ids(shown, tools=tools, add_generation_prompt=True))
        except Exception as error:
            raise RenderError(f"the renderer {self.name!r} refuses these messages: {error}") from error

    def text(self, views: Sequence[View], tools: list[View] | None) -> str:
        """See `ChatTemplate.text`."""
        return self.decode(self.render_views(views, tools))

    def ids_from(self, views: Sequence[View], tools: list[View] | None, written: str, index: int) -> list[int]:
        """See `ChatTemplate.ids_from`: the library's own ids, in which text that spells a token is not that token."""
        ids = self.render_views(views, tools)
        start = bisect_left(range(len(ids)), index - len(written), key=lambda at: -len(self.decode(ids[at:])))
        return ids[start:]

    def unchecked_bridge(self, reply: View, new: Sequence[View], tools: list[View] | None) -> Bridge | None:
        """See `ChatTemplate.unchecked_bridge`: the library's own ids, cut at the token that ends a stand-in for the
        reply."""
        stand_in, end = stand_in_for(reply)
        ids = self.render_views([{"role": "user", "content": "Q"}, stand_in, *new], tools)
        text, at = "", 0
        while at < len(ids) and not (ids[at] in self.stop_set and end in text):
            text += self.decode(ids[at : at + 1])
            at += 1
        if at == len(ids):
            return None
        closing = int(ids[at] == self.close_id)
        return Bridge(ids[at : at + closing], ids[at + closing :])


def _registry() -> dict[str, Any]:
    """The library's families, by name."""
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    return dict(RENDERER_REGISTRY)


def make_renderer(name: str, tokenizer: FastTokenizer, spec: ModelSpec) -> Any:
    """A renderer of the family. Raises whatever the library raises for a tokenizer that is not the family's."""
    from renderers.base import merge_chat_template_kwargs
    from renderers.configs import config_from_name

    config: Any = merge_chat_template_kwargs(config_from_name(name), spec.template_kwargs)
    renderer = _registry()[name](tokenizer, config)
    if hasattr(renderer, "_processor"):
        renderer._processor = SimpleNamespace(image_processor=_OnePlaceholder())
    return renderer


class _OnePlaceholder:
    """Takes the place of a family's image processor: every image is one placeholder.

    The renderer then writes an image as the chat template does, with one marker. The model's own processor expands the
    marker later (see vision.py), so it runs once per image, and sizes are computed in one place.
    """

    merge_size = 1

    def __call__(self, **_: Any) -> dict[str, Any]:
        """A grid of one."""
        return {"pixel_values": np.zeros((1, 1), np.float32), "image_grid_thw": np.ones((1, 3), np.int64)}


@cache
def _blank() -> Any:
    """The image that the renderer gets for every image part."""
    from PIL import Image

    return Image.new("RGB", (1, 1))
