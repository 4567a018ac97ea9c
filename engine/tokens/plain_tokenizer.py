"""A tokenizer's folder that needs no model-specific code -> the tokenizer, without the import of transformers.

Invariant: a folder is read here only where transformers is known to give the same tokenizer: it takes tokenizer.json
unchanged, or rebuilds exactly its content. `read_plain` gives None for every other folder, and transformers then reads
it. All attributes that turns do not need are those of transformers' tokenizer, which is imported at the first use.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens with a name, in the order in which templates get them."""

_AS_IT_STANDS = {"TokenizersBackend", "PreTrainedTokenizerFast"}
"""Tokenizer classes that take tokenizer.json unchanged."""
_STANDING_MODELS = {"", "llama", "olmo2", "qwen3", "qwen3_moe", "smollm3"}
"""Model types for which transformers uses the class that tokenizer_config.json names."""
_QWEN = {"Qwen2Tokenizer", "Qwen2TokenizerFast"}
_QWEN_MODELS = {"", "qwen2", "qwen3", "qwen3_moe"}
_QWEN_DEFAULTS = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2Tokenizer builds this pipeline, whatever the file says."""
_UNSET = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
"""Settings that this pipeline's BPE does not have."""
_CHANGES_MUCH = ("auto_map", "do_lower_case", "split_special_tokens", "strip_accents", "tokenize_chinese_chars")
"""Keys of tokenizer_config.json that change how text is read."""

Json = dict[str, Any]


class PlainTokenizer:
    """A tokenizer with what turns need, under transformers' names; all other attributes are transformers' own."""

    def __init__(self, folder: Path, backend: Tokenizer, special: dict[str, str], config: Json) -> None:
        self.name_or_path = str(folder)
        self.backend_tokenizer = backend
        self.special_tokens_map = special
        self.chat_template: str | None = config.get("chat_template")
        self.model_max_length: int | None = config.get("model_max_length")
        self.added_tokens_decoder = backend.get_added_tokens_decoder()
        ids: dict[str, int | None] = {name: backend.token_to_id(token) for name, token in special.items()}
        self.eos_token_id, self.unk_token_id = ids.get("eos_token"), ids.get("unk_token")

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_chat_template(self, chat_template: None = None, tools: Any = None) -> str | None:
        """The chat template."""
        return self.chat_template

    @cached_property
    def real(self) -> Any:
        """The tokenizer of transformers; imported at the first use."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.name_or_path, trust_remote_code=False)
        tokenizer.chat_template = self.chat_template
        return tokenizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.real, name)


def read_plain(folder: Path) -> PlainTokenizer | None:
    """The tokenizer of a folder; None where only transformers can read it."""
    file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not file.is_file() or not config_file.is_file() or (folder / "additional_chat_templates").exists():
        return None
    try:
        config = _object(config_file)
        kind = str(config.get("tokenizer_class"))
        model = (
            str(_object(folder / "config.json").get("model_type") or "") if (folder / "config.json").is_file() else ""
        )
        stands = kind in _AS_IT_STANDS and model in _STANDING_MODELS
        rebuilt = (kind in _QWEN and model in _QWEN_MODELS) or (kind in _AS_IT_STANDS and model == "qwen2")
        if not stands and not rebuilt:
            return None
        written = _object(file)
        if not stands and not _is_qwen(written):
            return None
        special = _special_tokens(folder, config, written, {} if stands else _QWEN_DEFAULTS)
        template = folder / "chat_template.jinja"
        if template.is_file():
            config["chat_template"] = template.read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # transformers reports what is wrong
    if special is None or not isinstance(config.get("chat_template"), str | None):
        return None
    from tokenizers import Tokenizer

    return PlainTokenizer(folder, Tokenizer.from_file(str(file)), special, config)


def _object(path: Path) -> Json:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def _special_tokens(folder: Path, config: Json, written: Json, defaults: dict[str, str]) -> dict[str, str] | None:
    """The named special tokens; None where loading them would change the vocabulary or how text is read."""
    if any(config.get(key) for key in _CHANGES_MUCH) or written.get("truncation") or written.get("padding"):
        return None
    if any(
        isinstance(value, str | dict) and key.endswith("_token") and key not in NAMED for key, value in config.items()
    ):
        return None  # a model-specific special token
    added = {token["content"]: token for token in written["added_tokens"]}
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        flags = {flag: bool(token.get(flag)) for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        if added.get(token["content"]) != {"id": int(number), "content": token["content"], **flags}:
            return None
    stated = {name: config.get(name, defaults.get(name)) for name in NAMED}
    special = {name: _content(token) for name, token in stated.items() if token is not None}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(extra, list) or any(token not in added for token in [*special.values(), *map(_content, extra)]):
        return None
    return special if _agrees(folder, config, special) and not config.get("add_prefix_space") else None


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _agrees(folder: Path, config: Json, special: dict[str, str]) -> bool:
    """Whether the files of older versions, where transformers reads them, agree."""
    if "added_tokens_decoder" in config:
        return True
    if (folder / "added_tokens.json").exists():
        return False
    legacy = folder / "special_tokens_map.json"
    if not legacy.is_file():
        return True
    return all(
        special.get(name) == _content(token) for name, token in _object(legacy).items() if name in NAMED
    ) and not (set(_object(legacy)) - set(NAMED))


def _is_qwen(written: Json) -> bool:
    """Whether tokenizer.json is the pipeline that Qwen2Tokenizer builds."""
    model, steps = written["model"], (written["pre_tokenizer"] or {}).get("pretokenizers") or []
    if model.get("type") != "BPE" or [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, to_bytes = steps
    outside = sorted(token["id"] for token in written["added_tokens"] if token["content"] not in model["vocab"])
    first = len(model["vocab"])
    return (
        not any(model.get(key) for key in _UNSET)
        and (split["pattern"], split["behavior"], split["invert"]) == ({"Regex": QWEN_SPLIT}, "Isolated", False)
        and not to_bytes["add_prefix_space"]
        and not to_bytes["use_regex"]
        and written["normalizer"] == {"type": "NFC"}
        and (written["decoder"] or {}).get("type") == "ByteLevel"
        and outside == list(range(first, first + len(outside)))  # Qwen2Tokenizer numbers them again
    )
