"""Reads the Dockerfile of a task whose image is a base and copied files; refuses every other one, with its line.

Pure: it reads text and returns what the image adds to its base.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

BASES = ("alpine", "bash", "busybox", "debian", "python", "ubuntu")
"""Images that the sandbox stands for: it has this machine's own shell, tools and Python instead of theirs."""
OWN = ("bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "logs", "proc", "run", "sbin", "sys", "tests", "usr")
"""Top-level folders of the sandbox, which tasks cannot write."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are found, where the image does not change it."""
_WITHOUT_EFFECT = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")
"""Instructions that change nothing here, because commands are run directly."""
_VARIABLE = re.compile(r"\\?\$(?:\{(\w+)\}|(\w+))")


class DockerfileError(Exception):
    """A Dockerfile that does not run here.

    Args:
        message: What is wrong.
        line: Its line, from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Copy:
    """One source of a `COPY`."""

    source: str
    """A path below the folder of the Dockerfile, which may have wildcards; `.`: all of the folder."""
    dest: str
    """An absolute path."""
    into: bool
    """Whether `dest` is a folder that the file is copied into."""
    line: int


@dataclass(slots=True)
class ImageFiles:
    """What an image adds to its base."""

    base: str = ""
    """One of `BASES`."""
    copies: list[Copy] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    """Folders that it makes, absolute."""
    workdir: str = "/"


def read_dockerfile(text: str) -> ImageFiles:
    """Read a Dockerfile.

    Raises:
        DockerfileError: It does more than copy files onto one of `BASES`.
    """
    image, based = ImageFiles(), False
    for line, written in _instructions(text):
        name, _, rest = written.partition(" ")
        name, rest = name.upper(), rest.strip()
        if name == "FROM":
            if based:
                raise DockerfileError("it has two stages; the sandbox has one base", line)
            image.base, based = _base(rest, line), True
        elif not based:
            raise DockerfileError(f"`{name}` comes before `FROM`", line)
        elif name in ("COPY", "ADD"):
            image.copies += _copies(name, rest, image, line)
        elif name == "WORKDIR":
            words = _words(rest, line)
            if len(words) != 1:
                raise DockerfileError("`WORKDIR` names one folder", line)
            image.workdir = _place(_filled(words[0], image, line), image.workdir, line)
            image.folders.append(image.workdir)
        elif name == "ENV":
            image.env |= _variables(rest, image, line)
        elif name == "RUN" and re.fullmatch(r"mkdir\s+(-p\s+)?[\w./ -]+", rest):
            folders = [word for word in rest.split()[1:] if not word.startswith("-")]
            image.folders += [_place(_filled(folder, image, line), image.workdir, line) for folder in folders]
        elif name not in _WITHOUT_EFFECT:
            shown = written if len(written) <= 60 else written[:57] + "…"
            raise DockerfileError(f"`{shown}` builds an image, and the sandbox has only a base and copied files", line)
    if not based:
        raise DockerfileError("it has no `FROM`", 1)
    return image


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """(line, instruction) without comments, with continued lines joined."""
    joined, first = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            if not joined and re.match(r"#\s*escape\s*=", line):
                raise DockerfileError("the directive `escape` is not read", number)
            continue
        first = first or number
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        if "<<" in line:
            raise DockerfileError("here-documents are not read", number)
        yield first, re.sub(r"\s+", " ", joined + line, count=1) if joined else line
        joined, first = "", 0
    if joined:
        yield first, joined.strip()


def _base(rest: str, line: int) -> str:
    """The name of the base, without registry and tag."""
    image = re.split(r"\s+(?i:as)\s+", rest)[0].strip()
    name = re.sub(r"^(docker\.io/)?(library/)?", "", image.partition("@")[0]).partition(":")[0]
    if name not in BASES:
        raise DockerfileError(
            f"`FROM {image}` is not a base; the sandbox stands for {', '.join(BASES[:-1])} and {BASES[-1]}", line
        )
    return name


def _copies(name: str, rest: str, image: ImageFiles, line: int) -> list[Copy]:
    words = _words(rest, line)
    while words and words[0].startswith("--"):
        flag = words.pop(0)
        if not flag.startswith("--chown="):
            raise DockerfileError(f"`{name} {flag}` is not supported", line)
    if len(words) < 2:
        raise DockerfileError(f"`{name}` needs a source and a destination", line)
    *sources, dest = (_filled(word, image, line) for word in words)
    place = _place(dest, image.workdir, line)
    into = dest.endswith("/") or dest in (".", "..") or dest.endswith(("/.", "/..")) or len(sources) > 1
    for source in sources:
        if "://" in source or source.startswith("git@"):
            raise DockerfileError(f"`{name} {source}` needs a network", line)
        if ".." in PurePosixPath(source).parts:
            raise DockerfileError(f"`{name} {source}` leaves the folder", line)
        if name == "ADD" and re.search(r"\.(tar|tgz|tbz2?|txz|tar\.\w+)$", source):
            raise DockerfileError(f"`ADD {source}` unpacks an archive; copy its files instead", line)
    return [Copy(source.lstrip("/") or ".", place, into, line) for source in sources]


def _words(rest: str, line: int) -> list[str]:
    """The words of an instruction, in its shell form or as JSON."""
    if rest.startswith("["):
        try:
            words = json.loads(rest)
        except ValueError:
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise DockerfileError(f"{rest[:60]!r} is not a JSON list of texts", line)
        return words
    try:
        return shlex.split(rest)
    except ValueError as error:
        raise DockerfileError(f"{rest[:60]!r} cannot be read: {error}", line) from None


def _variables(rest: str, image: ImageFiles, line: int) -> dict[str, str]:
    name, _, value = rest.partition(" ")
    if "=" not in name:  # the old form: `ENV NAME value`
        return {name: _filled(value.strip(), image, line)}
    variables = {}
    for word in _words(rest, line):
        name, equals, value = word.partition("=")
        if not equals:
            raise DockerfileError(f"`ENV {word}` has no value", line)
        variables[name] = _filled(value, image, line)
    return variables


def _filled(text: str, image: ImageFiles, line: int) -> str:
    """A text with the values of variables that `ENV` has set."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if match[0].startswith("\\"):
            return match[0][1:]
        if name == "PATH" and name not in image.env:
            return PATH
        if name not in image.env:
            raise DockerfileError(f"the variable `{name}` has no value; `ENV` must set it before", line)
        return image.env[name]

    if re.search(r"\$\{\w+[^\w}]", text):
        raise DockerfileError(f"{text[:60]!r}: write `${{NAME}}`; other forms are not read", line)
    return _VARIABLE.sub(value, text)


def _place(path: str, workdir: str, line: int) -> str:
    """An absolute path without `.` and `..`, in a folder that tasks may write."""
    place = "/" + posixpath.normpath(posixpath.join(workdir, path)).lstrip("/")
    if own_folder(place):
        raise DockerfileError(f"{place} is in /{place.split('/')[1]}, which is the sandbox's own", line)
    return place


def own_folder(path: str) -> bool:
    """Whether an absolute path lies in one of `OWN`."""
    return path.split("/")[1] in OWN
