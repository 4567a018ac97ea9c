"""What tests share: a tiny but real tokenizer and model, made on the spot."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import built_structs  # noqa: F401  # before any module that makes a struct
import httpx
import pytest
import structlog
import typer.testing
from chat_kit import TEMPLATES, make_tokenizer
from hypothesis import HealthCheck, settings
from shipped_tokenizers import unpack
from written_specs import TALKS_ON_WHEN_CUT, listener_spec, save_spec
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def _leave_objects(worker: int) -> None:
        """End a worker process without freeing the objects of torch and others one by one, which takes seconds."""
        if os.getpid() == worker:  # not in a fork
            os._exit(0)

    atexit.register(_leave_objects, os.getpid())
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Containers often set PYTHONDONTWRITEBYTECODE; each process that a test starts would then compile the engine anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests write thousands of small files and stores, and wait for the disk at each commit: in memory the whole run takes a
# twentieth less time.
IN_MEMORY = Path("/dev/shm")
if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# An HTTP client reads the machine's certificates when it is made, 25 ms: once is enough.
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)

# The commands set a plain form of tracebacks up; without one, structlog draws each with its source lines, 30 ms.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

# `CliRunner.invoke` builds the tree of all commands from their signatures: once is enough.
typer.testing._get_command = functools.cache(typer.testing._get_command)

CHATML = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "Tools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role != 'system' %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CORPUS = [
    "What is 17 plus 25? The answer is 42.",
    '<tool_call>\n{"name": "calculate", "arguments": {"expression": "3 * (4 + 5)"}}\n</tool_call>',
    "That is not right. Try again, and give only the number in <answer> tags.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "The quick brown fox jumps over the lazy dog; 0123456789 times.",
]


# No example is timed: its time depends on the machine's other work. The examples of the default profile are the same in
# each run, so more of them would find little; scripts/random_tests.sh takes new ones, and 100 where a test says no number.
_EVERY_PROFILE: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", **_EVERY_PROFILE, derandomize=True, max_examples=15)
settings.register_profile("random", **_EVERY_PROFILE, print_blob=True, max_examples=100)
settings.load_profile("fixed")


REAL_SERVER = (
    "tests/plugins/sglang/served/",
    "tests/plugins/vllm/served/",
    "tests/plugins/sglang/test_vision_sglang.py",
)
"""Where the tests of the real server are."""
RAY = "tests/plugins/drivers/"
"""Where the tests of Ray's clusters are."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Give all tests of a file to one worker process, so that a fixture of a module is made once.

    All tests of the real server go to one process: one server then serves all of them. So do those of Ray's clusters, each of which
    starts a process for each CPU and more. The plugin's own mark `xdist_group`
    has no effect with pytest 9.2: the plugin sets a node id that this pytest does not read.
    """

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "real server" if file.startswith(REAL_SERVER) else RAY if file.startswith(RAY) else file

    config.option.loadscopereorder = False  # the plugin's order begins with the files of many tests: see below
    return FileScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of few tests: long tests are in these, and would otherwise be waited for at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        counts = Counter(item.path for item in items)
        items.sort(key=lambda item: counts[item.path])


gc.disable()  # until all tests are collected: what their modules import stays
_count_frozen = gc.get_freeze_count


def pytest_collection_finish() -> None:
    """Exclude what collection loaded from garbage collection, and collect seldom: a full collection takes a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    count = _count_frozen()
    gc.get_freeze_count = lambda: count  # each run asks for it, and counting a million objects takes 20 ms


def pytest_sessionfinish() -> None:
    """Collect garbage before a worker process says that it has finished. A last collection comes after that, and takes seconds where there
    is much to look at; a worker that takes more than five is interrupted by execnet, and the interrupt looks like one of a test."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.collect()
        gc.freeze()


@pytest.fixture
def frozen_objects_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc.get_freeze_count` counts each time that it is called."""
    monkeypatch.setattr(gc, "get_freeze_count", _count_frozen)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries of a request to a server or an API begin at a hundredth of a second."""
    from engine.backends import outage

    monkeypatch.setattr(outage, "FIRST_PAUSE", 0.01)


@pytest.fixture(scope="session")
def _make_cache(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """Makes a cache folder. Shared are the models, which are downloaded once, the reply readers, which are proven once for each
    tokenizer, and the environment of the real SGLang server.
    """
    from engine.tokens.catalogue import cache_root

    os.environ.setdefault("SGLANG_CPU_VENV", str(cache_root() / "sglang-cpu"))

    shared = {name: cache_root() / name for name in ("models", "readers")}
    for target in shared.values():
        target.mkdir(parents=True, exist_ok=True)
    root, numbers = tmp_path_factory.mktemp("caches"), itertools.count()

    def make() -> str:
        folder = root / str(next(numbers))
        folder.mkdir()
        for name, target in shared.items():
            (folder / name).symlink_to(target)
        return str(folder)

    return make


@pytest.fixture(autouse=True)
def _own_cache(_make_cache: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache of its own, so that no test finds what another one has prepared."""
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", _make_cache())


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's folder is the current one."""
    monkeypatch.chdir(tmp_path)


def build_tokenizer(folder: Path, vocab_size: int = 1000) -> Path:
    """Train a byte-level BPE tokenizer with a ChatML template and save it in `folder`."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    # As Qwen2's own: transformers gives a Qwen2 model this one, whatever tokenizer.json says.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    fast.save_pretrained(folder)
    return folder


def build_model(folder: Path, tokenizer_dir: Path, **changes: Any) -> Path:
    """Save a two-layer Qwen2 with random weights, and the tokenizer, in `folder`."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    settings: dict[str, Any] = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**(settings | changes)))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (tokenizer_dir / name).exists():
            shutil.copy(tokenizer_dir / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE tokenizer (vocab at most 1000) and a ChatML template."""
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """That tokenizer with a two-layer Qwen2, float32, whose sampling is not degenerate."""
    return build_model(tmp_path_factory.mktemp("model"), tiny_tokenizer_dir)


@pytest.fixture(scope="module")
def chat_format(tiny_model_dir: Path) -> Any:
    """The chat format of the model of `tiny_model_dir`."""
    from engine.schemas.model import ModelSpec
    from engine.tokens.loading import load_format

    return load_format(ModelSpec(path=str(tiny_model_dir)), tiny_model_dir)


@pytest.fixture(scope="session")
def smollm_dir() -> Path:
    """The catalogue's real instruct model, downloaded and converted once."""
    from engine.tokens.catalogue import resolve_model

    return resolve_model("smollm2-135m-instruct")


@pytest.fixture
def train_spec(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Path]:
    """Write a spec that trains: two turns, four samples of each task, and what the test changes."""

    def make(name: str = "spec", train: dict[str, Any] | None = None, **changes: Any) -> Path:
        spec: dict[str, Any] = {
            **listener_spec(name, tiny_model_dir),
            "backend": {"kind": "local", "dtype": "float32", "max_batch": 16},
            "machine": TALKS_ON_WHEN_CUT,
            "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64},
            "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
            "rollout": {"samples_per_task": 4, "seed": 3},
            "train": {"steps": 3, "tasks_per_step": 2, "optimizer": {"lr": 0.003}} | (train or {}),
        }  # fmt: skip
        return save_spec(tmp_path / f"{name}.yaml", spec | changes)

    return make


@pytest.fixture(scope="session")
def tokenizer_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a tokenizer for each of TEMPLATES."""
    return {name: make_tokenizer(tmp_path_factory.mktemp(name), text) for name, text in TEMPLATES.items()}


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`shipped(name, **model)`: the chat format of a real tokenizer that ships with the tests; made once for each combination."""
    from engine.schemas.model import ModelSpec
    from engine.tokens.loading import load_format
    from engine.tokens.template import ChatTemplate

    folder = tmp_path_factory.mktemp("shipped")
    made: dict[str, ChatTemplate] = {}

    def get(name: str, **model: Any) -> ChatTemplate:
        key = f"{name} {sorted(model.items())}"
        if key not in made:
            made[key] = load_format(ModelSpec(path=str(unpack(name, folder)), **model), Path())
        return made[key]

    return get


@pytest.fixture(scope="session")
def formats(tokenizer_dirs: dict[str, Path]) -> Any:
    """`formats(template, **model)`: the chat format of one of TEMPLATES; made once for each combination."""
    from engine.schemas.model import ModelSpec
    from engine.tokens.loading import load_format
    from engine.tokens.template import ChatTemplate

    made: dict[str, ChatTemplate] = {}

    def get(template: str, **model: Any) -> ChatTemplate:
        key = f"{template} {sorted(model.items())}"
        if key not in made:
            made[key] = load_format(ModelSpec(path=str(tokenizer_dirs[template]), **model), Path())
        return made[key]

    return get
