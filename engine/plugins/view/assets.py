"""The files of the pages, and their code as one script for a page that is a file.

The modules in `page/` import each other only by lines of the form `import { a, b } from "./module.js";`, and no two of
them have a top-level name in common. So they can be put one after the other into one script, without a build step.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([a-z]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(async )?function|const|let)", re.MULTILINE)
_ADDED_STYLE = re.compile(rb'document\.getElementById\("[0-9a-f]{64}"\)')
"""Where the chart library asks whether the styles of its maps are in the page. The page's policy forbids them, and no
curve needs them."""
ENTRY = "app"
TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "html": "text/html; charset=utf-8"}
"""Media types by suffix."""


@cache
def read(name: str) -> str | None:
    """Return a file of the pages; None if there is none of that name."""
    if not re.fullmatch(r"[a-z]+\.(js|css|html)", name):
        return None
    file = files("engine.plugins.view") / "page" / name
    return file.read_text("utf-8") if file.is_file() else None


def imports_of(module: str) -> list[str]:
    """Return the modules that a module imports, in order."""
    return [match[2] for match in _IMPORT.finditer(read(f"{module}.js") or "")]


@cache
def one_script() -> str:
    """Return all modules as one module, each after those that it imports."""
    order: list[str] = []

    def visit(module: str) -> None:
        if module not in order:
            for other in imports_of(module):
                visit(other)
            order.append(module)

    visit(ENTRY)
    parts = (_EXPORT.sub("", _IMPORT.sub("", read(f"{module}.js") or "")) for module in order)
    return "\n".join(parts)


@cache
def chart_library() -> bytes | None:
    """Return the script of the chart library, which the package plotly ships, without the styles of maps; None if it is
    not installed."""
    try:
        file = files("plotly") / "package_data" / "plotly.min.js"
        return _ADDED_STYLE.sub(b"true", file.read_bytes()) if file.is_file() else None
    except ModuleNotFoundError:
        return None
