"""How the servers of one kind write requests and replies, as data.

One encoder of requests and one reader of replies (`wire.py`), and one backend (`backend.py`), use it for every kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.schemas.base import Struct
from engine.schemas.generation import SamplingParams, VersionSpan

if TYPE_CHECKING:
    from engine.plugins.servers.wire import EncodedRequest


class ReplyFields(msgspec.Struct, frozen=True):
    """What a reply says, not yet compared with its request."""

    ids: list[int]
    """The sampled ids."""
    logprobs: list[float | None]
    logprob_ids: list[int] | None
    """The ids that the log-probs are those of; None: they name no ids."""
    finish: str
    """`stop`, `length` or `abort`; everything else is refused."""
    matched: int | str | None
    """For `stop`: the id or string that ended the reply."""
    message: str | None
    """For `abort`: the reason."""
    echoed: bool
    """Whether the reply has the ids of the prompt."""
    echo: list[int] | None
    """These ids; None where they are the text that was sent, byte for byte."""
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int
    rid: str = ""
    queue_seconds: float = 0.0
    spans: list[VersionSpan] = []
    """The weight versions of the ids."""
    version: str | None = None
    """The last weights' own name."""
    experts: np.ndarray | None = None


class Dialect(Struct, frozen=True, kw_only=True):
    """Paths, names of fields, and defaults."""

    servers: str
    """The servers' name in messages."""
    path: str
    """Path of the requests that sample."""
    abort_path: str | None = None
    """Path of the calls that abort a request; None: a server aborts a request whose connection is closed."""
    probe: str
    """Path that a server answers at once, also while it is busy."""
    start: str
    """What starts a server with the model in `{folder}`."""

    # -- a request
    prompt: str
    rid: str
    length: str
    """The maximum number of sampled tokens."""
    seed: str
    prefixes: str
    """Requests with one name here share cached prefixes."""
    adapter: str
    echo: str
    """Whether the reply has the ids of the prompt."""
    echo_since: str
    """The first version that reports them."""
    experts: str = ""
    """The fields that ask for the experts of the tokens from number `%d` on."""
    always: Mapping[str, Any] = {}
    """Fields that every request has."""
    parameters: str = ""
    """The object that has the sampling parameters, length and seed; empty: the request itself."""
    names: Mapping[str, str | None] = {}
    """Sampling parameters with another name; `a.b` stands in the object `a`, and None is not sent, because it only
    changes the text."""
    defaults: Mapping[str, Any] = {}
    """Parameters that are sent where the spec sets none. Others are then left out."""
    ban: float
    """Logit bias of a banned id; JSON has no infinity."""
    ignore_eos_needs_no_ids: bool = False
    """With `ignore_eos`, stop ids would still end a reply: none are sent."""

    # -- a reply
    fields: Callable[[bytes | bytearray, EncodedRequest], ReplyFields]
    """Where things stand in a reply. It raises `ReplyError`, `msgspec.DecodeError`, `ValueError` or `IndexError` where
    they do not."""
    lowest: float | None = None
    """The log-prob of a probability of 0, where servers report one."""
    vocabulary: re.Pattern[str]
    """Finds the largest id, or the number of ids, in the error message for a logit bias of an id that is too large."""
    first_id: int = 0
    """What the size of the vocabulary exceeds that number by."""

    def sampling_fields(
        self, sampling: SamplingParams, stop_ids: Sequence[int] = (), banned_ids: Sequence[int] = ()
    ) -> dict[str, Any]:
        """The sampling parameters of a request, without length and seed."""
        chosen = sampling.model_dump(exclude_none=True, exclude={"max_new_tokens"})
        if stop_ids:
            chosen["stop_token_ids"] = list(stop_ids)
        if sampling.ignore_eos and self.ignore_eos_needs_no_ids:
            chosen["stop_token_ids"] = []
        if banned_ids:
            chosen["logit_bias"] = chosen.get("logit_bias", {}) | {str(token): self.ban for token in banned_ids}
        fields = dict(self.defaults)
        for name, value in chosen.items():
            theirs = self.names.get(name, name)
            if value in ([], {}) or theirs is None:
                continue
            outer, _, inner = theirs.rpartition(".")
            (fields.setdefault(outer, {}) if outer else fields)[inner] = value
        return fields

    def test_body(self, **parameters: Any) -> dict[str, Any]:
        """A request for one token after the id 0."""
        parameters = {self.length: 1, **parameters}
        return {self.prompt: [0], **({self.parameters: parameters} if self.parameters else parameters)}
