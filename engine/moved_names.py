"""Public modules that moved. Importing an old one is an error that names the new one; entry points are read through this table.

Only the standard library is imported here, because `engine/__init__.py` imports this module.
"""

from __future__ import annotations

MOVED: dict[str, str] = {
    "engine.checks": "engine.validate",
    "engine.doctor": "engine.plugins.doctor",
    "engine.integrations.trainers": "engine.plugins.trainers",
    "engine.scenarios": "engine.plugins.scenarios",
    "engine.view": "engine.plugins.view",
}
"""Old -> new: a module, or a package with all that is in it; `module:object` for one object."""


def new_module(name: str) -> str | None:
    """The new name of a module; None if it did not move."""
    parent, rest = name, ""
    while parent:
        if parent in MOVED:
            return MOVED[parent] + rest
        parent, _, last = parent.rpartition(".")
        rest = f".{last}{rest}"
    return None


def current(use: str) -> str:
    """An entry point, `module:object`, as it is named now. Warns where it moved."""
    module, colon, name = use.partition(":")
    new = MOVED.get(use)
    if new is None and (moved := new_module(module)) is not None:
        new = f"{moved}{colon}{name}"
    if new is None:
        return use
    import warnings

    warnings.warn(f"`{use}` is `{new}` now; write the new name", FutureWarning, stacklevel=2)
    return new


class MovedModules:
    """The last finder of `sys.meta_path`: it answers only for modules of `MOVED` and for packages that only had such modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raises: ModuleNotFoundError: the module moved."""
        if not name.startswith("engine."):
            return
        if (new := new_module(name)) is not None:
            raise ModuleNotFoundError(f"`{name}` is `{new}` now", name=name)
        if inside := [f"`{old}` is `{new}`" for old, new in MOVED.items() if old.startswith(f"{name}.")]:
            raise ModuleNotFoundError(f"there is no `{name}`; of what was in it, {', '.join(inside)} now", name=name)
