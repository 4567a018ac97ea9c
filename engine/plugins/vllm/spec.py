"""`backend: {kind: vllm}`."""

from __future__ import annotations

from typing import ClassVar, Literal

from engine.schemas.backend import ServersSpec, changes_distribution, cuts_distribution
from engine.schemas.generation import SamplingParams


class VLLMBackendSpec(ServersSpec):
    """vLLM servers, over their completions API with token ids: those of `urls`, or those that the run starts
    (`launch`)."""

    runtime: ClassVar[str] = "engine.plugins.vllm.client:VLLMBackend"
    reports_versions: ClassVar[bool] = False
    takes_images: ClassVar[bool] = False
    unsupported_sampling: ClassVar[tuple[str, ...]] = ("stop_regex", "custom_params")

    kind: Literal["vllm"] = "vllm"
    """vLLM servers, over their completions API with token ids."""

    def conflict(self, sampling: SamplingParams) -> str | None:
        changed, cut = changes_distribution(sampling), cuts_distribution(sampling)
        if not changed or not cut:
            return None
        return (
            f"`{changed[0]}` with `{cut[0]}`: vLLM reports log-probs without `{changed[0]}` (raw_logprobs) or of the "
            f"tokens that `{cut[0]}` leaves (processed_logprobs), and rows hold those of neither"
        )
