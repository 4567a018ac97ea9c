"""What every kind of backend declares: its capabilities, and the files and servers of one spec's backend."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, ClassVar

from engine.schemas.base import Contract
from engine.schemas.generation import SamplingParams

CONSTRAINTS = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params")
"""Sampling parameters that only SGLang supports."""


class BackendBase(Contract):
    """Base class of the config classes: the capabilities of a kind of backend, and the files and servers of one spec's backend.

    spec.backend.exact_ids                      # of this spec's backend
    [kind.kind_name() for kind in backend_classes() if kind.trains]
    """

    if TYPE_CHECKING:
        kind: str = ""  # each kind has a literal of its own

    runtime: ClassVar[str]
    """`module:class` of the runtime class, an `engine.backends.backend.Backend`."""
    exact_ids: ClassVar[bool] = True
    """Replies carry the sampled token ids with their log-probs. False: replies are text, and no row can train."""
    reports_versions: ClassVar[bool] = True
    """Replies name the weight version that sampled each token."""
    trains: ClassVar[bool] = False
    """It takes new weights while it runs, by one of `weight_methods`; the point `weight_syncs` has what sends them."""
    weight_methods: ClassVar[tuple[str, ...]] = ()
    """With `trains`: the values of `train.weight_sync.method` that it takes."""
    weights_in_servers: ClassVar[bool] = False
    """Its servers outlive a run, so their weights may differ from those of `model.path`."""
    releases_memory: ClassVar[bool] = False
    """Its servers can release the memory of their GPUs during an update."""
    resumable: ClassVar[tuple[str, ...]] = ()
    """Keys that a resumed run or training may change."""
    takes_messages: ClassVar[bool] = False
    """Requests carry messages and tools, and the server applies its own chat template; the ids of a request are not read."""
    takes_images: ClassVar[bool] = True
    """Requests may carry images, for a model that takes some."""
    reports_experts: ClassVar[bool] = False
    """It can report the experts that a mixture-of-experts model chose for each token (`routed_experts`)."""
    scripted: ClassVar[bool] = False
    """Replies are written in the spec for one role. So no two roles share it, and scenarios may use it."""
    unsupported_sampling: ClassVar[tuple[str, ...]] = ()
    """Keys of `sampling` that it does not support. Setting one is an error."""
    max_temperature: ClassVar[float] = inf
    """The highest `sampling.temperature` that it takes."""

    @classmethod
    def kind_name(cls) -> str:
        """The value of `kind` in a spec."""
        return str(cls.model_fields["kind"].default)

    def unsupported(self, sampling: SamplingParams) -> list[str]:
        """Keys of `sampling` that are set but not supported by this backend."""
        default = SamplingParams()
        return [name for name in self.lacking if getattr(sampling, name) != getattr(default, name)]

    @property
    def lacking(self) -> tuple[str, ...]:
        """`unsupported_sampling`, and what this spec's backend lacks beside it."""
        return self.unsupported_sampling

    def conflict(self, sampling: SamplingParams) -> str | None:
        """Why keys of `sampling`, each of which is supported, cannot be set together; None: they can."""
        return None

    def sync_method(self, method: str, *, lora: bool) -> str:
        """The method by which a training sends weights: `method`, with `auto` resolved.

        Args:
            method: `train.weight_sync.method`.
            lora: Whether a LoRA adapter is trained.
        """
        return method if method != "auto" else "tensors"

    def shares_servers(self, other: BackendBase) -> bool:
        """Whether the two backends have a server in common."""
        return bool({url.rstrip("/") for url in self.server_urls} & {url.rstrip("/") for url in other.server_urls})

    @property
    def adapter_name(self) -> str | None:
        """Name of the LoRA adapter that the policy's requests are sampled with; None: the base model."""
        return None

    @property
    def asks_experts(self) -> bool:
        """Whether the policy's replies carry the experts of each token."""
        return False

    @property
    def files(self) -> dict[str, str]:
        """The files that it reads: key -> path, relative to the spec."""
        return {}

    @property
    def server_urls(self) -> list[str]:
        """Base URLs of its servers."""
        return []

    @property
    def reply_seconds(self) -> float:
        """Longest time that one reply may take, in seconds; infinity if the backend has no limit."""
        return inf

    @property
    def priced(self) -> bool:
        """Whether the cost of its replies is counted."""
        return False

    @property
    def served_model(self) -> str | None:
        """The name by which an API knows the model that samples; None: it is the model of `model.path`."""
        return None

    @property
    def half_precision(self) -> str | None:
        """The 16-bit type in which it computes; None: float32, or not set in the spec."""
        return None
