"""transformers in this process, with continuous batching."""

from engine.backends.local.backend import LocalBackend, open_local

__all__ = ["LocalBackend", "open_local"]
