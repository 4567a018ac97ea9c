"""What is read from the text of a class or function is what importing it shows: over the engine's own modules and many of Python's."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_but

import engine
from engine.spec.access import Access
from engine.spec.code.entry import EntryError
from engine.validate.code.code_facts import ImportedCode, Method, read_code
from engine.validate.code.source import Sources

QUICK = ["enum", "queue", "random", "statistics"]
SLOW = [
    "json.decoder",
    "logging.handlers",
    "threading",
    "unittest.case",
    "argparse",
    "ast",
    "asyncio.queues",
    "asyncio.streams",
    "bdb",
    "calendar",
    "cmd",
    "code",
    "codecs",
    "collections",
    "concurrent.futures.thread",
    "configparser",
    "contextlib",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "doctest",
    "email.message",
    "fileinput",
    "fractions",
    "ftplib",
    "gettext",
    "glob",
    "gzip",
    "html.parser",
    "http.client",
    "http.cookies",
    "http.server",
    "imaplib",
    "importlib.metadata",
    "io",
    "ipaddress",
    "json.encoder",
    "logging",
    "mailbox",
    "mimetypes",
    "multiprocessing.pool",
    "numbers",
    "optparse",
    "pathlib",
    "pdb",
    "pickle",
    "platform",
    "plistlib",
    "poplib",
    "pprint",
    "profile",
    "pstats",
    "sched",
    "selectors",
    "shelve",
    "shlex",
    "smtplib",
    "socketserver",
    "sqlite3.dbapi2",
    "string",
    "tarfile",
    "subprocess",
    "tempfile",
    "textwrap",
    "timeit",
    "traceback",
    "types",
    "typing",
    "unittest.mock",
    "urllib.request",
    "uuid",
    "wave",
    "weakref",
    "xml.dom.minidom",
    "xml.sax.handler",
    "xmlrpc.client",
    "zipfile",
    "zoneinfo",
]
METHODS = (
    "reset",
    "step",
    "respond",
    "score",
    "tools",
    "close",
    "__call__",
    "open",
    "get",
    "run",
    "append",
    "read",
    "__getitem__",
)


def modules() -> Iterator[Any]:
    yield from QUICK
    yield from (pytest.param(name, marks=pytest.mark.slow) for name in SLOW)
    parts = (
        "engine.environments",
        "engine.validate",
        "engine.plugins.adapters",
        "engine.plugins.harbor",
        "engine.plugins.scenarios",
        "engine.spec",
    )
    named = [info.name for info in pkgutil.walk_packages(engine.__path__, "engine.") if info.name.startswith(parts)]
    environments = [name for name in named if name.startswith(parts[0])]
    yield from slow_but(named, *environments[::4])


def shape(signature: inspect.Signature) -> list[tuple[str, int, bool]]:
    return [(item.name, int(item.kind), item.default is item.empty) for item in signature.parameters.values()]


@pytest.mark.parametrize("name", modules())
def test_the_text_says_what_importing_shows(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError:
        pytest.skip("it is not there, or needs a package")
    sources = Sources(Path(), Access())
    for attribute, thing in sorted(vars(module).items()):
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        try:
            definition = sources.entry(f"{name}:{attribute}").definition
        except EntryError as error:
            pytest.fail(str(error))
        if definition is None or getattr(thing, "_is_protocol", False):
            continue
        read, imported = read_code(definition, sources), ImportedCode(thing)
        signature = read.signature if read.kind != "unknown" else None
        real = imported.signature
        if signature is not None and real is not None:
            assert shape(signature) == shape(real), attribute
        for method in METHODS if read.kind == "class" else ():
            found = read.method(method)
            if found == "missing":
                assert imported.method(method) == "missing", (attribute, method)
            elif isinstance(found, Method):
                there = imported.method(method)
                assert isinstance(there, Method), (attribute, method)
                if found.signature is not None and there.signature is not None:
                    assert shape(found.signature) == shape(there.signature), (attribute, method)
