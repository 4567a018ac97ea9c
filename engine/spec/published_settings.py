"""Published settings: settings of other projects' examples as spec files, which `extends:` knows by name.

Each file is `published/<name>.yaml`. It names the source of its values (repository, file, commit), and lists in comments what has no
equivalent in a spec ("not carried").
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("published")


def published_names() -> list[str]:
    """Names of the published settings, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def is_published_name(value: str) -> bool:
    """Whether a value of `extends` has the form of a name: neither a folder nor a suffix."""
    return "/" not in value and "\\" not in value and "." not in value


def published_file(name: str) -> str:
    """The file of a published setting."""
    return str(FOLDER / f"{name}.yaml")
