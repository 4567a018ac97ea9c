"""API keys."""

from __future__ import annotations

import os

from engine.errors import BackendError
from engine.masking import remember


def read_key(variable: str | None) -> str | None:
    """The API key in an environment variable, which is masked in logs and stores from now on; None without a variable.

    Raises:
        BackendError: Kind `unauthorized`: the variable is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise BackendError(f"the environment variable {variable} (backend.api_key_env) is not set", kind="unauthorized")
    remember(variable, key)
    return key


def key_headers(key: str | None) -> dict[str, str]:
    """The header that sends a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
