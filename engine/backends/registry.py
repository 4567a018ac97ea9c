"""From a spec's `backend:` to the class that runs it.

The config class names the class that runs (`runtime`), so there is no table here. Only the backend that a spec asks for is
imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from engine.backends.backend import Backend
    from engine.schemas.backend import BackendBase
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


def runtime_class(declared: type[BackendBase]) -> type[Backend]:
    """The class that runs backends with this config class."""
    module, _, name = declared.runtime.partition(":")
    return cast("type[Backend]", getattr(import_module(module), name))


def open_backend(loaded: LoadedSpec, format: ChatTemplate) -> Backend:
    """The backend of a spec, not yet started.

    Raises:
        BackendError: The spec asks for something that this backend does not have.
    """
    spec = loaded.spec.backend
    return runtime_class(type(spec)).open(spec, format, loaded)
