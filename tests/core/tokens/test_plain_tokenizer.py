"""Folders that are read without transformers are read as transformers reads them; the others are left to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.schemas.message import Message
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format
from engine.tokens.plain_tokenizer import PlainTokenizer, read_plain
from engine.tokens.tokenizer import FastTokenizer

REAL = os.environ.get("EPISODE_ENGINE_TOKENIZERS", "")
CHAT = [
    Message(role="system", content="Be brief — très."),
    Message(role="user", content="What is 17 plus 25?\n"),
    Message(role="assistant", content="42 <|im_end|>"),
    Message(role="user", content=" Why? "),
]
TEXTS = [
    "Hello, world! It's 12345 o'clock.\n\n\n  x = {\t'a': 1}\r\n",
    "<|im_start|>user\n<|im_end|><|eot_id|><tool_call>{}</tool_call><think>",
    "Ünïcödé e\u0301 \u1112\u1161\u11ab 日本語 😀👨‍👩‍👧 \u00a0\u2028 ﬁ Å",
    "",
    " ",
    "\x00\x01 a\x7f",
]


def assert_same(plain: FastTokenizer, real: FastTokenizer) -> None:
    assert plain.full.get_vocab() == real.full.get_vocab()
    assert plain.added == real.added
    assert (plain.eos_token_id, plain.unk_token_id) == (real.eos_token_id, real.unk_token_id)
    assert list(plain.full.special_tokens_map.items()) == list(real.full.special_tokens_map.items())
    assert plain.full.chat_template == real.full.chat_template
    for text in TEXTS:
        assert plain.encode(text) == real.encode(text)
        assert plain.decode(plain.encode(text)) == real.decode(real.encode(text))
    for start in range(0, plain.size, 997):
        ids = list(range(start, min(start + 40, plain.size)))
        assert plain.decode(ids) == real.decode(ids)


def loaded(folder: Path) -> tuple[FastTokenizer, FastTokenizer]:
    plain = read_plain(folder)
    assert plain is not None
    return FastTokenizer(plain), FastTokenizer(plain.real)


def test_a_plain_folder_is_read_as_transformers_reads_it(tiny_tokenizer_dir: Path) -> None:
    assert_same(*loaded(tiny_tokenizer_dir))


@pytest.fixture(scope="module")
def pair(tiny_tokenizer_dir: Path) -> tuple[FastTokenizer, FastTokenizer]:
    return loaded(tiny_tokenizer_dir)


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_has_the_same_ids(pair: tuple[FastTokenizer, FastTokenizer], text: str) -> None:
    plain, real = pair
    assert plain.encode(text) == real.encode(text)
    assert plain.decode(plain.encode(text)) == real.decode(real.encode(text))


def agrees(tokenizer: FastTokenizer, words: list[str]) -> None:
    text = "".join(words)
    assert tokenizer.encode(text) == list(tokenizer._backend.encode(text, add_special_tokens=False).ids)


def of_words(tokenizer: FastTokenizer) -> st.SearchStrategy[list[str]]:
    """Parts of texts in which added tokens stand between words, white space and pieces of themselves."""
    added = sorted(tokenizer.added)
    pieces = (
        [token[:3] for token in added]
        + [token[1:] for token in added]
        + ["don't", " x", "  ", "\n\n", "12 3", "é", "<"]
    )
    return st.lists(st.sampled_from(added) | st.sampled_from(pieces), max_size=12)


@settings(deadline=None)
@given(data=st.data())
def test_a_text_is_cut_at_added_tokens_as_the_library_cuts_it(
    pair: tuple[FastTokenizer, FastTokenizer], data: st.DataObject
) -> None:
    agrees(pair[0], data.draw(of_words(pair[0])))


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="NOT CHECKED ON REAL TOKENIZERS: scripts/fetch_tokenizers.sh brings them")
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1"])
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_text_is_cut_at_added_tokens_as_real_tokenizers_cut_it(name: str, data: st.DataObject) -> None:
    tokenizer = OPENED.get(name) or OPENED.setdefault(name, loaded(Path(REAL) / name)[0])
    agrees(tokenizer, data.draw(of_words(tokenizer)))


OPENED: dict[str, FastTokenizer] = {}


def test_an_added_token_that_takes_white_space_is_left_to_the_library() -> None:
    import transformers
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(WITH_TOKENS))
    tokenizer.add_special_tokens([AddedToken("<a>", lstrip=True), AddedToken("<b>"), AddedToken("<b>>")])
    fast = FastTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    for text in ("x  <a> y", "x <b> y", "x <b>> y", "<b><b>>", "<a><b>", "  <a>"):
        agrees(fast, [text])


WITH_TOKENS: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {character: at for at, character in enumerate("<>abxyĠ")}, "merges": []},
}


def test_a_conversation_has_the_ids_of_apply_chat_template(tiny_tokenizer_dir: Path) -> None:
    form = load_format(ModelSpec(path=str(tiny_tokenizer_dir), allow_special=True), Path())
    assert isinstance(form.fast.full, PlainTokenizer)
    messages = [{"role": message.role, "content": message.text} for message in CHAT]
    wanted = form.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert form.render(CHAT) == wanted


@pytest.mark.slow
def test_neither_transformers_nor_torch_is_imported(tiny_tokenizer_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.tokens.loading import load_format;"
        "from engine.schemas.model import ModelSpec; form = load_format(ModelSpec(path=sys.argv[1]), Path());"
        "form.encode('17 plus 25'); heavy = {'transformers', 'torch', 'renderers', 'openai'};"
        "print(sorted(heavy & set(sys.modules))); form.tokenizer.padding_side;"
        "print('transformers' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tiny_tokenizer_dir)], capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["[]", "True"], ran.stderr


def test_a_template_of_the_specs_own_is_the_real_tokenizers_too(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}[{{ m.content }}]<|im_end|>{% endfor %}")
    form = load_format(ModelSpec(path=str(tiny_tokenizer_dir), chat_template="own.jinja"), tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    assert form.tokenizer.apply_chat_template(messages, tokenize=False) == "[Hi]<|im_end|>"
    assert form.decode(form.render([Message(role="user", content="Hi")])) == "[Hi]<|im_end|>"


@pytest.fixture
def changed(tiny_tokenizer_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(**config: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny_tokenizer_dir, folder)
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return folder

    return make


def test_a_changed_folder_is_still_plain(changed: Callable[..., Path]) -> None:
    assert_same(*loaded(changed(bos_token="<|im_start|>", add_bos_token=True, model_max_length=512)))


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": None},
        {"auto_map": {"AutoTokenizer": ["mine.Tokenizer", None]}},
        {"bos_token": "<new>"},  # transformers would add it to the vocabulary
        {"extra_special_tokens": ["<new>"]},
        {"extra_special_tokens": {"image_token": "<|im_end|>"}},
        {"image_token": "<|im_end|>"},  # templates would be handed it
        {"split_special_tokens": True},
        {"add_prefix_space": True},
        {"do_lower_case": True},
        {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": False}}},
        {"added_tokens_decoder": "nonsense"},
    ],
    ids=lambda config: next(iter(config)),
)
def test_what_transformers_may_read_otherwise_is_left_to_it(changed: Callable[..., Path], config: Any) -> None:
    assert read_plain(changed(**config)) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", '{"model_type": "qwen3_5"}'),  # its own tokenizer class is taken, whatever the folder names
        ("config.json", '{"model_type": "mistral"}'),
        ("config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("added_tokens.json", '{"<new>": 1000}'),
        ("special_tokens_map.json", '{"bos_token": "<|im_start|>"}'),
        ("special_tokens_map.json", '{"additional_special_tokens": ["<|im_start|>"]}'),
        ("additional_chat_templates/tool_use.jinja", "{{ tools }}"),
    ],
)
def test_files_beside_it_that_matter_are_left_to_transformers(
    changed: Callable[..., Path], file: str, content: str
) -> None:
    folder = changed()
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(content)
    assert read_plain(folder) is None


@pytest.mark.parametrize(("kind", "model"), [("Qwen2Tokenizer", "qwen3"), ("TokenizersBackend", "qwen2")])
def test_what_qwens_class_rebuilds_is_plain_where_it_rebuilds_the_same(
    changed: Callable[..., Path], kind: str, model: str
) -> None:
    folder = changed(tokenizer_class=kind, **({"unk_token": None} if model == "qwen3" else {}))
    (folder / "config.json").write_text(json.dumps({"model_type": model}))
    plain, real = loaded(folder)
    assert type(real.full).__name__ == "Qwen2Tokenizer"
    assert_same(plain, real)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": None},
        {"decoder": None},
        {"padding": {"strategy": "BatchLongest"}},
    ],
    ids=str,
)
def test_what_qwens_class_rebuilds_otherwise_is_left_to_it(changed: Callable[..., Path], change: Any) -> None:
    folder = changed(tokenizer_class="Qwen2Tokenizer")
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert read_plain(folder) is None


def test_a_folder_without_a_tokenizer_file_is_left_to_transformers(changed: Callable[..., Path]) -> None:
    folder = changed()
    (folder / "tokenizer.json").unlink()
    assert read_plain(folder) is None


def test_older_files_that_say_the_same_do_not_matter(changed: Callable[..., Path]) -> None:
    folder = changed()
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}')
    assert_same(*loaded(folder))


@pytest.mark.model
def test_the_catalogues_model_is_plain(smollm_dir: Path) -> None:
    assert_same(*loaded(smollm_dir))


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="NOT CHECKED ON REAL TOKENIZERS: scripts/fetch_tokenizers.sh brings them")
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1"])
def test_real_tokenizers_are_plain(name: str) -> None:
    assert_same(*loaded(Path(REAL) / name))


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="NOT CHECKED ON REAL TOKENIZERS: scripts/fetch_tokenizers.sh brings them")
def test_a_tokenizer_with_tokens_of_its_own_is_left_to_transformers() -> None:
    assert read_plain(Path(REAL) / "gemma3") is None
