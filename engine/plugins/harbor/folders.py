"""Reads one task folder of Harbor's form: what it asks for, in which limits, and the files that its sandbox begins
with.

    NAME/task.toml  NAME/instruction.md  NAME/tests/test.sh  NAME/environment/Dockerfile  NAME/environment/…

Read from Harbor 0.25: `models/task/config.py` (task.toml), `models/task/task.py` (the folder), `verifier/verifier.py`
(rewards). What the sandbox cannot give (images that are built, a network, services, several steps, GPUs) is refused
with the file and the line.

Invariant: only regular files below the task's folder are read; a link that leaves it is an error.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.plugins.harbor.dockerfile import Copy, DockerfileError, ImageFiles, own_folder, read_dockerfile

MOST_FILES = 10_000
"""Maximum number of files of `environment/`, and of `tests/`."""
MOST_BYTES = 256 * 2**20
"""Maximum bytes of one of these folders."""
MOST_TEXT = 2**20
"""Maximum bytes of task.toml, instruction.md and Dockerfile."""
SECONDS = 600.0
"""Time of the agent and of the verifier where task.toml gives none; Harbor's own for the verifier."""
MEMORY, STORAGE = 2048, 1024
"""MiB of memory of each process, and of files, where task.toml gives none."""
_NETWORK = re.compile(
    r"\b(?:(?:apt|apt-get|apk|dnf|yum)\s+(?:-\S+\s+)*(?:add|install|update)"
    r"|(?:pip3?|npm|gem|cargo|conda|go)\s+(?:-\S+\s+)*install"
    r"|npm\s+(?:ci|i)|uv\s+(?:pip|sync|add|run|tool)|uvx|npx|curl|wget|git\s+(?:clone|fetch|pull))\b"
)
"""Commands that need a network."""
_HERE = re.compile(r"\b(?:localhost|127\.0\.0\.1)\b")
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)


class HarborError(Exception):
    """A task folder that cannot be read or does not run here.

    Args:
        message: What is wrong.
        path: The file or folder.
        line: The line of the file, from 1.
    """

    def __init__(self, message: str, path: Path, line: int | None = None) -> None:
        super().__init__(f"{path}{f':{line}' if line else ''}: {message}")
        self.message, self.path, self.line = message, path, line


class UnsupportedTaskError(HarborError):
    """A sound task folder that asks for more than the sandbox has."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task folder."""

    folder: Path
    name: str
    instruction: str
    agent_seconds: float
    verifier_seconds: float
    memory_mb: int
    storage_mb: int
    image: ImageFiles
    verifier_env: dict[str, str] = field(default_factory=dict)


def task_folders(folder: Path) -> list[Path]:
    """The task folders of a folder, sorted by name; the folder itself if it is one.

    Raises:
        HarborError: There are none.
        OSError: It cannot be listed.
    """
    if (folder / "task.toml").exists():
        return [folder]
    folders = sorted(item.parent for item in folder.glob("*/task.toml"))
    if not folders:
        raise HarborError("no folder with a task.toml", folder)
    return folders


def read_task(folder: Path) -> HarborTask:
    """Read a task folder.

    Raises:
        HarborError: A part is missing, cannot be read, or asks for more than the sandbox has.
    """
    config = _config(folder)
    environment, verifier = _table(config, "environment", folder), _table(config, "verifier", folder)
    _check_config(config, environment, verifier, folder)
    name = _table(config, "task", folder).get("name", folder.name)
    if not isinstance(name, str):
        raise HarborError("`task.name` is not a text", folder / "task.toml")
    image = _image(folder, environment)
    for copy in image.copies:
        copied(folder, copy)
    for file in files_of(folder / "tests", folder):
        _check_script(file)
    script = folder / "tests/test.sh"
    if not script.is_file():
        raise HarborError("it is missing; it writes /logs/verifier/reward.txt", script)
    lines = _text(folder / "instruction.md", folder).split("\n")
    while lines and (_CANARY.match(lines[0].strip())):
        lines.pop(0)
    instruction = "\n".join(lines).strip("\n")
    if not instruction.strip():
        raise HarborError("it is empty", folder / "instruction.md")
    return HarborTask(
        folder,
        name,
        instruction,
        _number(_table(config, "agent", folder), "timeout_sec", SECONDS, folder),
        _number(verifier, "timeout_sec", SECONDS, folder),
        int(_number(environment, "memory_mb", MEMORY, folder)),
        int(_number(environment, "storage_mb", STORAGE, folder)),
        image,
        _env(verifier, "verifier.env", folder),
    )


def files_of(folder: Path, task: Path) -> Iterator[Path]:
    """The regular files below a folder, sorted; none if it does not exist.

    Raises:
        HarborError: A link leaves the task's folder, something is no regular file, or there is too much.
    """
    count, size = 0, 0
    for root, names, files in os.walk(folder):
        names.sort()
        for name in sorted([*files, *(name for name in names if (Path(root) / name).is_symlink())]):
            path = Path(root) / name
            status = _within(path, task).stat()
            if stat.S_ISDIR(status.st_mode):
                raise HarborError("a link to a folder is not copied; copy the folder", path)
            if not stat.S_ISREG(status.st_mode):
                raise HarborError("it is no regular file", path)
            count, size = count + 1, size + status.st_size
            if count > MOST_FILES:
                raise HarborError(f"more than {MOST_FILES:,} files", folder)
            if size > MOST_BYTES:
                raise HarborError(f"the files have more than {MOST_BYTES >> 20} MiB together", folder)
            yield path


def copied(folder: Path, copy: Copy) -> list[tuple[Path, str]]:
    """The files that a `COPY` names, each with its absolute path in the sandbox.

    Raises:
        HarborError: There are none, or one may not be copied.
    """
    base, source = folder / "environment", copy.source
    wild = any(mark in source for mark in "*?[")
    matches = sorted(base.glob(source)) if wild else [base / source]
    if not any(match.exists() or match.is_symlink() for match in matches):
        raise HarborError(f"`{source}` does not exist in environment/", base / "Dockerfile", copy.line)
    files: list[tuple[Path, str]] = []
    for match in matches:
        if match.is_dir() and not match.is_symlink():
            files += [(file, f"{copy.dest}/{file.relative_to(match)}") for file in files_of(match, folder)]
            continue
        if not _within(match, folder).is_file() or match.stat().st_size > MOST_BYTES:
            raise HarborError(f"it is no regular file of at most {MOST_BYTES >> 20} MiB", match)
        files.append((match, f"{copy.dest}/{match.name}" if wild or copy.into else copy.dest))
    placed = [(file, "/" + dest.lstrip("/")) for file, dest in files if file != base / "Dockerfile"]
    for file, dest in placed:
        if dest == "/" or own_folder(dest):
            raise HarborError(
                f"`{source}` puts {file.name} at {dest}, which is the sandbox's own", base / "Dockerfile", copy.line
            )
    return placed


def _within(path: Path, folder: Path) -> Path:
    """The path that a path leads to.

    Raises:
        HarborError: It leads nowhere, or out of the folder.
    """
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        raise HarborError("the link leads nowhere", path) from None
    if not target.is_relative_to(folder.resolve()):
        raise HarborError(f"the link leaves the task's folder: it leads to {target}", path)
    return target


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "task.toml"
    try:
        return tomllib.loads(_text(path, folder))
    except tomllib.TOMLDecodeError as error:
        raise HarborError(f"not TOML: {error}", path) from None
    except RecursionError:
        raise HarborError("it is nested too deeply", path) from None


def _text(path: Path, folder: Path) -> str:
    if not path.exists() and not path.is_symlink():
        raise HarborError("it is missing", path)
    try:
        if not _within(path, folder).is_file():
            raise HarborError("it is no regular file", path)
        with path.open("rb") as file:
            data = file.read(MOST_TEXT + 1)
    except OSError as error:
        raise HarborError(f"it cannot be read: {error.strerror}", path) from None
    if len(data) > MOST_TEXT:
        raise HarborError(f"it has more than {MOST_TEXT >> 20} MiB", path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise HarborError(f"not UTF-8: {error}", path) from None


def _check_config(
    config: Mapping[str, Any], environment: Mapping[str, Any], verifier: Mapping[str, Any], folder: Path
) -> None:
    """Refuse what the sandbox does not have."""
    asked = {
        "steps": config.get("steps"),
        "environment.docker_image": environment.get("docker_image"),
        "environment.gpus": environment.get("gpus"),
        "environment.tpu": environment.get("tpu"),
        "environment.mcp_servers": environment.get("mcp_servers"),
        "environment.healthcheck": environment.get("healthcheck"),
        "environment.skills_dir": environment.get("skills_dir"),
        "environment.allow_internet": environment.get("allow_internet"),
        "verifier.environment": verifier.get("environment"),
        "verifier.collect": verifier.get("collect"),
    }
    modes = {
        f"{name}.network_mode": _table(config, name, folder).get("network_mode")
        for name in ("environment", "agent", "verifier")
    }
    asked |= {name: mode for name, mode in modes.items() if mode != "no-network"}
    asked["environment.os"] = environment.get("os") if str(environment.get("os", "linux")).lower() != "linux" else None
    asked["verifier.environment_mode"] = (
        verifier.get("environment_mode") if verifier.get("environment_mode") != "shared" else None
    )
    for name, value in asked.items():
        if value:
            why = (
                "the sandbox has no network"
                if "network" in name or "internet" in name
                else "the sandbox does not have it"
            )
            raise UnsupportedTaskError(f"`{name}` is {value!r}, and {why}", folder / "task.toml")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).exists():
            raise UnsupportedTaskError("the sandbox runs no services", folder / "environment" / name)


def _check_script(file: Path) -> None:
    """Refuse a script of the tests that installs or downloads something: without a network it would pay a wrong
    reward."""
    if file.suffix != ".sh" or file.stat().st_size > MOST_TEXT:
        return
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        code = line.partition("#")[0] if line.lstrip().startswith("#") or " #" in line else line
        if (command := _NETWORK.search(code)) and not _HERE.search(code):
            raise UnsupportedTaskError(f"`{command[0]}` needs a network, and the sandbox has none", file, number)


def _image(folder: Path, environment: Mapping[str, Any]) -> ImageFiles:
    path = folder / "environment/Dockerfile"
    text = _text(path, folder)
    try:
        image = read_dockerfile(text)
    except DockerfileError as error:
        raise UnsupportedTaskError(str(error), path, error.line) from None
    image.env |= _env(environment, "environment.env", folder)
    if (workdir := environment.get("workdir")) is not None:
        if not isinstance(workdir, str) or not workdir.startswith("/"):
            raise HarborError("`environment.workdir` is not an absolute path", folder / "task.toml")
        try:
            image.workdir = read_dockerfile(f"FROM debian\nWORKDIR {json.dumps([workdir])}").workdir
        except DockerfileError as error:
            raise HarborError(f"`environment.workdir`: {error}", folder / "task.toml") from None
        image.folders.append(image.workdir)
    return image


def _table(config: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, dict):
        raise HarborError(f"`{name}` is not a table", folder / "task.toml")
    return table


def _number(table: Mapping[str, Any], name: str, default: float, folder: Path) -> float:
    value = table.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise HarborError(f"`{name}` is {value!r}; write a number above 0", folder / "task.toml")
    return float(value)


def _env(table: Mapping[str, Any], name: str, folder: Path) -> dict[str, str]:
    variables = table.get("env", {})
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise HarborError(f"`{name}` is not a table of texts", folder / "task.toml")
    for key, value in variables.items():
        if "${" in value:
            raise UnsupportedTaskError(
                f"`{name}.{key}` takes a variable of this machine, which the sandbox does not get", folder / "task.toml"
            )
    return variables
