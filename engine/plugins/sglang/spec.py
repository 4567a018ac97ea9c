"""`backend: {kind: sglang}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import model_validator

from engine.schemas.backend import ServersSpec


class SGLangBackendSpec(ServersSpec):
    """SGLang servers, over their native HTTP API: those of `urls`, or those that the run starts (`launch`)."""

    runtime: ClassVar[str] = "engine.plugins.sglang.client:SGLangBackend"
    trains: ClassVar[bool] = True
    weight_methods: ClassVar[tuple[str, ...]] = ("auto", "disk", "tensors", "collective", "adapter")
    releases_memory: ClassVar[bool] = True
    reports_experts: ClassVar[bool] = True
    for_urls: ClassVar[tuple[str, ...]] = ("router", "api_key_env")
    RENAMED: ClassVar[Mapping[str, str]] = {"patience": "health_timeout"}

    kind: Literal["sglang"] = "sglang"
    router: bool = False
    """The URL is an sglang-router; the start checks which fields it drops."""
    verify: bool = False
    """Load the model here, at the start, and compare one prompt's log-probs (with an image, for a model that takes
    some) with each server's."""
    routed_experts: bool | Literal["exact"] = False
    """Keep the experts that a mixture-of-experts model chose for each token, in rows too; `engine train` then uses the
    same experts. The servers need `--enable-return-routed-experts`; launched ones get it. `exact`: episodes share no
    cached prefix, so that the first token of a reply, too, has the experts that it was sampled with."""
    sessions: bool = False
    """The servers keep the prompts of episodes of more than 8,192 tokens (SGLang's sessions), so that a turn sends its
    new tokens and images alone. They hold up to 180 MB of memory (not of the GPU) for each such episode, more with
    images. Not with `router`, nor with servers that run with `--dp-size`."""

    @model_validator(mode="after")
    def _sessions_without_router(self) -> SGLangBackendSpec:
        if self.sessions and self.router:
            raise ValueError("a router does not send the requests of a session to its server: remove `sessions`")
        return self

    @property
    def asks_experts(self) -> bool:
        return self.routed_experts is not False

    def sync_method(self, method: str, *, lora: bool) -> str:
        return method if method != "auto" else "adapter" if lora else "disk"
