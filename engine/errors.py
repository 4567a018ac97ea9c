"""Every exception that the engine raises, in one tree.

    EngineError
    ├── SpecError            a spec cannot be loaded or is invalid; carries every diagnostic
    ├── RenderError          messages cannot become tokens (or tokens messages) for this model
    │   └── BridgeError      no exact continuation of the tape exists
    ├── ImageError           an image cannot be shown to the model, or its placeholders are not where they must be
    ├── LedgerError          a reward event cannot be carried out
    ├── GuardError           a guard or a rule's `when` failed on real values
    ├── BackendError         a backend did not answer; `retryable` says whether another try may
    │   ├── ContextOverflow  the prompt and the reply do not fit the model: a limit, not a fault
    │   └── OutageError      no server can be asked: the run stops, and no episode fails for it
    ├── DeviceError          the spec names a device that torch does not have
    ├── WorldError           an environment, a tool or a user raised an error, did not answer in time, or gave an invalid answer
    ├── StoreError           a run cannot be read or written
    ├── ReplayError          a journal does not lead where it says
    ├── FailingError         the first episodes of a run all failed in the same way: the run stops
    └── TrainError           the model cannot learn, or no longer should

One episode's failure is a value (`engine.schemas.trajectory.Failure`); an exception of this tree is how it
travels from where it happened to the executor, which turns it into that value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.schemas.trajectory import Blame
    from engine.spec.diagnostic import Diagnostic


class EngineError(Exception):
    """Base of them all. `kind` and `blame` become the failure's."""

    kind: str = "engine_error"
    blame: Blame = "engine"
    stops_run: bool = False
    """It is no episode's failure: the whole run stops, and what was under way can be resumed."""


class SpecError(EngineError):
    """A spec that cannot be loaded or is invalid."""

    kind = "spec_error"
    blame: Blame = "spec"

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = list(diagnostics)
        super().__init__("\n".join(str(d) for d in self.diagnostics))


class RenderError(EngineError):
    """Messages cannot become this model's tokens."""

    kind = "render_error"
    blame: Blame = "spec"


class BridgeError(RenderError):
    """No exact continuation of the tape exists."""

    kind = "bridge_error"


class ImageError(EngineError):
    """An image cannot be shown to the model, or placeholders and images are not the same.

    Kinds: `image_unreadable`, `image_empty`, `image_too_large`, `image_refused` (by the model's own processor),
    `too_many_images`, `image_placeholder` (text spells one), `sampled_placeholder` (the model wrote one),
    `image_mismatch` (placeholders are not those of the images), `image_missing` (the run store has it not).
    """

    def __init__(self, message: str, *, kind: str, blame: Blame = "environment") -> None:
        self.kind = kind
        self.blame = blame
        super().__init__(message)


class LedgerError(EngineError):
    """A reward event cannot be carried out."""

    kind = "ledger_error"

    def __init__(self, message: str, *, blame: Blame = "spec") -> None:
        self.blame = blame
        super().__init__(message)


class GuardError(EngineError):
    """A guard failed on real values."""

    kind = "guard_error"
    blame: Blame = "spec"


class BackendError(EngineError):
    """A backend did not answer as it should."""

    blame: Blame = "backend"

    def __init__(
        self,
        message: str,
        *,
        kind: str = "backend_error",
        retryable: bool = False,
        refused: bool = False,
        retry_after: float | None = None,
    ) -> None:
        """
        Args:
            message: what happened and what to do about it.
            kind: the failure's kind.
            retryable: another try may succeed.
            refused: no server worked on the request, so this was no try; it may be sent again once one is there.
            retry_after: seconds after which the server wants to be asked again.
        """
        self.kind = kind
        self.retryable = retryable
        self.refused = refused
        self.retry_after = retry_after
        super().__init__(message)


class ContextOverflow(BackendError):
    """The prompt and the reply do not fit the model's context."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="context_overflow")


class OutageError(BackendError):
    """No server can be asked: none is there at the start (kind `unreachable`), or none has replied for `backend.wait`
    (kind `outage`)."""

    stops_run = True


class DeviceError(EngineError):
    """`backend.device` or `train.device` names a device that torch does not have."""

    kind = "no_device"
    blame: Blame = "spec"


class FailingError(EngineError):
    """The first episodes of a run all failed in the same way. `cause` says how, and where in the spec."""

    kind = "failing"
    stops_run = True

    def __init__(self, message: str, cause: str) -> None:
        self.cause = cause
        super().__init__(message)


class WorldError(EngineError):
    """A world raised an error, did not answer in time, or gave an invalid answer."""

    def __init__(self, message: str, *, blame: Blame, kind: str, trace: str | None = None) -> None:
        self.blame = blame
        self.kind = kind
        self.trace = trace
        super().__init__(message)


class StoreError(EngineError):
    """A run cannot be read or written."""

    kind = "store_error"


class ReplayError(EngineError):
    """A journal does not lead where it says."""

    kind = "replay_error"


class TrainError(EngineError):
    """Training cannot begin or go on.

    Kinds: `train_setup` (the spec, model or device does not admit it), `weights_not_taken` (a backend does not sample
    with the weights that it was sent), `diverged` (loss or gradient is no number), `no_data` (no group has anything to
    learn from), `checkpoint` (cannot be read or written).
    """

    def __init__(self, message: str, *, kind: str) -> None:
        self.kind = kind
        super().__init__(message)
