"""From a spec's `model` to a chat format: where the files are, and what they say about sizes and stop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import RenderError
from engine.schemas.model import ModelSpec
from engine.tokens.choosing import choose_reader
from engine.tokens.families import family_format
from engine.tokens.jinja_template import JinjaSource, JinjaTemplate
from engine.tokens.patches import patched, template_hash
from engine.tokens.plain_tokenizer import read_plain
from engine.tokens.template import ChatTemplate
from engine.tokens.tokenizer import FastTokenizer
from engine.tokens.vision import Vision
from engine.tokens.vision_families import FAMILIES, family_of


def load_format(model: ModelSpec, base: Path) -> ChatTemplate:
    """The chat format that a spec's `model` asks for. Loads the tokenizer, once; no weights.

    Args:
        model: The spec's `model`.
        base: The folder that relative paths are under.

    Raises:
        RenderError: There is no tokenizer, no chat template, no such family or no such tool-call format.
        EntryError: `model.tool_calls` names a class that cannot be imported.
        ModelError: The model's files are not there and cannot be fetched.
    """
    folder, source = model_folders(model, base)
    tokenizer = read_plain(source) or _ask_transformers(source)
    if model.chat_template is not None:
        try:
            tokenizer.chat_template = (base / model.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise RenderError(f"model.chat_template: {model.chat_template} cannot be read: {error}") from error
    config = _json(folder / "config.json")
    settings = config.get("text_config", {}) | config
    fast = FastTokenizer(tokenizer)
    size = int(settings.get("vocab_size") or fast.size)
    limit = settings.get("max_position_embeddings") or getattr(tokenizer, "model_max_length", None)
    context = model.context or (int(limit) if limit and limit < 1 << 24 else None)
    ends = _json(folder / "generation_config.json").get("eos_token_id")
    eos = [int(id_) for id_ in ([ends] if isinstance(ends, int) else ends or [])]
    family = family_of(config)
    vision = None if family is None else Vision(family, folder, fast, model)
    chat_format: ChatTemplate
    if model.renderer in ("auto", "template"):
        template = _load_template(fast, model)
        chat_format = JinjaTemplate(fast, template, model, vocab_size=size, context=context, eos=eos)
        choose_reader(chat_format, model, base)
    else:
        if model.template_patches:
            raise RenderError(
                f"model.template_patches has no effect with `renderer: {model.renderer}`, which renders without the "
                "chat template; leave one out"
            )
        chat_format = family_format(fast, model, base, vocab_size=size, context=context)
    chat_format.vision = vision
    if vision is None and config.get("vision_config"):
        chat_format.no_vision_fix = (
            f"images of `{config.get('model_type')}` models are not supported: take one of {', '.join(FAMILIES)}, or "
            "show this model text alone"
        )
    return chat_format


def load_tokenizer(model: ModelSpec, base: Path) -> FastTokenizer:
    """The tokenizer that a spec's `model` names, as in `load_format`, without anything else: no chat template, no code.

    Raises:
        RenderError: There is no tokenizer.
        ModelError: The model's files are not there and cannot be fetched.
    """
    source = model_folders(model, base)[1]
    return FastTokenizer(read_plain(source) or _ask_transformers(source))


def _load_template(tokenizer: FastTokenizer, model: ModelSpec) -> JinjaSource:
    full = tokenizer.full
    if not full.chat_template:
        raise RenderError(
            f"the tokenizer of {model.path!r} has no chat template; name a Jinja file in model.chat_template"
        )
    source, with_tools = full.get_chat_template(None), full.get_chat_template(None, tools=[{}])
    if model.template_patches:
        plain = source or with_tools
        source, names = patched(plain, model.template_patches)
        if not names:
            raise RenderError(
                f"model.template_patches: no patch is known for the chat template of {model.path!r} (hash "
                f"{template_hash(plain)}); leave it out"
            )
        with_tools = source if with_tools == plain else with_tools
        full.chat_template = source if source == with_tools else {"default": source, "tool_use": with_tools}
    source = source or with_tools
    return JinjaSource(source, {**full.special_tokens_map, **model.template_kwargs}, with_tools)


def model_folders(model: ModelSpec, base: Path) -> tuple[Path, Path]:
    """The folders of a model's config and weights, and of its tokenizer.

    Raises:
        ModelError: They are not there and cannot be fetched.
    """
    folder = _folder(model.path, model.revision, base)
    return folder, folder if model.tokenizer is None else _folder(model.tokenizer, None, base)


def _folder(path: str, revision: str | None, base: Path) -> Path:
    if (base / path).is_dir():
        return base / path
    from engine.tokens.catalogue import resolve_model

    return resolve_model(path, revision)


def _ask_transformers(source: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RenderError(f"model: no tokenizer can be loaded from {source}: {error}") from error
    except Exception as error:  # damaged files raise whatever the library meets
        raise RenderError(f"model: no tokenizer can be loaded from {source}: {error!r}") from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
