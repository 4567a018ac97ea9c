"""The frameworks whose rows are read: one file each, and one entry in `FRAMEWORKS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.plugins.audit.files import ForeignDocument
from engine.plugins.audit.frameworks import areal, skyrl, slime, trl, verl
from engine.plugins.audit.rows import ForeignRow

FRAMEWORKS: Mapping[str, tuple[str, Callable[[ForeignDocument], list[ForeignRow]]]] = {
    "verl": ("verl", verl.read),
    "trl": ("TRL", trl.read),
    "slime": ("slime", slime.read),
    "skyrl": ("SkyRL", skyrl.read),
    "areal": ("AReaL", areal.read),
}
"""Title and reader of each framework, by the name that `--from` takes."""
