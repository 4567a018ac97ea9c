"""From a spec's `backend:` to the class that runs it, and what its kind refuses.

The config class names the class that runs (`runtime`), so there is no table here. Only the backend that a spec asks for
is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import BackendError
from engine.plugin import load

if TYPE_CHECKING:
    from engine.backends.backend import Backend
    from engine.schemas.backend import BackendBase
    from engine.schemas.generation import SamplingParams
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


def runtime_class(declared: type[BackendBase]) -> type[Backend]:
    """The class that runs backends with this config class."""
    runtime: type[Backend] = load(declared.runtime)
    return runtime


def open_backend(loaded: LoadedSpec, format: ChatTemplate) -> Backend:
    """The backend of a spec, not yet started.

    Raises:
        BackendError: The spec asks for something that this backend does not have.
    """
    spec = loaded.spec.backend
    return runtime_class(type(spec)).open(spec, format, loaded)


def refuse_parameters(declared: BackendBase, sampling: SamplingParams) -> None:
    """Refuse sampling parameters that a kind of backend does not have.

    Raises:
        BackendError: Kind `unsupported_parameter`; the message names all of them.
    """
    if sampling.temperature > declared.max_temperature and "temperature" not in declared.lacking:
        raise BackendError(
            f"`sampling.temperature` is {sampling.temperature:g}; the {declared.kind_name()} backend takes at most "
            f"{declared.max_temperature:g}",
            kind="unsupported_parameter",
        )
    given = declared.unsupported(sampling)
    if given:
        names = ", ".join(f"`sampling.{name}`" for name in given)
        raise BackendError(
            f"the {declared.kind_name()} backend does not support {names}: leave it out, or use "
            "`backend: {kind: sglang}`",
            kind="unsupported_parameter",
        )
