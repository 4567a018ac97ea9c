"""SGLang servers over their native HTTP API.

http.py     requests over connections that stay open; knows nothing about SGLang
wire.py     what is sent to /generate and what comes back, checked to the token
resume.py   a reply that was interrupted goes on
pool.py     which server a request goes to, and which ones are there
checks.py   what is asked of servers before the first episode
images.py   whether a server sees the rows' pixels
verify.py   a prompt's log-probs beside those of the model's files, where the spec asks
control.py  weights, adapters, pauses
client.py   the backend
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine.errors import BackendError
from engine.masking import remember

if TYPE_CHECKING:
    from engine.backends.sglang.client import SGLangBackend
    from engine.schemas.backend import SGLangBackendSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.format import ChatFormat

__all__ = ["open_sglang", "read_key"]


def open_sglang(spec: SGLangBackendSpec, format: ChatFormat, loaded: LoadedSpec) -> SGLangBackend:
    """The backend for these servers, not yet started.

    Raises:
        BackendError: the key's environment variable is not set, a URL is none, or the model's images cannot be served.
    """
    from engine.backends.sglang.client import SGLangBackend
    from engine.backends.sglang.images import refuse_family
    from engine.tokens.catalogue import resolve_model

    if format.vision is not None:
        refuse_family(format.vision)

    try:
        return SGLangBackend(
            spec,
            format,
            sampling=loaded.spec.sampling,
            model=loaded.spec.model.path,
            api_key=read_key(spec.api_key_env),
            folder=lambda: resolve_model(loaded.spec.model.path, loaded.spec.model.revision, loaded.base),
        )
    except ValueError as error:
        raise BackendError(f"backend.urls: {error}", kind="bad_url") from None


def read_key(variable: str | None) -> str | None:
    """The API key out of an environment variable; None where the spec names none.

    Raises:
        BackendError: it is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise BackendError(f"the environment variable {variable} (backend.api_key_env) is not set", kind="unauthorized")
    remember(variable, key)
    return key
