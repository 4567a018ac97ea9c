"""The section `backend` of the kind `local`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from engine.schemas.backend import CONSTRAINTS, BackendBase


class LocalBackendSpec(BackendBase):
    """transformers in this process, with batching of concurrent requests."""

    runtime: ClassVar[str] = "engine.plugins.local.backend:LocalBackend"
    trains: ClassVar[bool] = True
    weight_methods: ClassVar[tuple[str, ...]] = ("auto", "tensors")
    unsupported_sampling: ClassVar[tuple[str, ...]] = CONSTRAINTS
    reports_experts: ClassVar[bool] = True
    loads_model: ClassVar[bool] = True

    kind: Literal["local"] = "local"
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, bfloat16 on a GPU. In 16 bits log-probs differ from a recomputation, by up to 0.5."""
    deterministic: bool = False
    """A reply's ids and log-probs are bit-identical in any batch, and after a restart. About half as fast
    in full batches. The start checks it for the model and device, and fails if logits depend on the batch."""
    max_batch: int = Field(default=32, ge=1)
    """Maximum number of sequences in one forward pass."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for torch. Default: torch's choice."""
    routed_experts: bool = False
    """Keep the experts that a mixture-of-experts model chose for each token, in rows too; `engine train` then uses the
    same experts."""

    @property
    def asks_experts(self) -> bool:
        return self.routed_experts

    @property
    def half_precision(self) -> str | None:
        return self.dtype if self.dtype in ("bfloat16", "float16") else None
