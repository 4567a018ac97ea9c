"""Every exception that the engine raises, in one tree.

    EngineError
    ├── SpecError            a spec cannot be loaded or is invalid; carries every diagnostic
    ├── RenderError          messages cannot become tokens (or tokens messages) for this model
    ├── ImageError           an image cannot be shown to the model, or placeholders do not match the images
    ├── LedgerError          a reward event cannot be carried out
    ├── GuardError           a guard or a rule's `when` failed on real values
    ├── BackendError         a backend did not answer; `retryable` says whether a retry may succeed
    │   ├── ContextOverflow  the prompt and the reply exceed the model's context: a limit, not an error
    │   └── OutageError      no server is reachable: the run stops, and no episode fails because of it
    ├── SpecCodeError        code that the spec names raised an error, did not answer in time, or gave an invalid answer
    ├── AdapterError         an adapter's library is missing, or answered in another form than it documents
    ├── StoreError           a run cannot be read or written
    ├── ReplayError          replaying a journal gives other transitions than it records
    ├── FailingError         the first episodes of a run all failed in the same way: the run stops
    ├── AuditError           rows of another framework cannot be read
    └── TrainError           training cannot start or must stop

The failure of an episode is a value (`engine.schemas.trajectory.Failure`). An exception of this tree carries it
from where it occurred to the executor, which converts it into that value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.schemas.trajectory import Blame
    from engine.spec.text.diagnostic import Diagnostic


class EngineError(Exception):
    """Base class of all of them.

    Args:
        message: What happened and what to do about it.
        kind: The kind of the failure. Default: the class's.
        blame: Who caused it. Default: the class's.
    """

    kind: str = "engine_error"
    blame: Blame = "engine"
    stops_run: bool = False
    """Whether it stops the whole run instead of failing one episode; running episodes can be resumed."""
    drains: bool = False
    """With `stops_run`: the other episodes are not cancelled, because each stops by itself before its next request."""
    resume_words: str = ""
    """With `stops_run`: what the command that resumes the run must say in addition, after a space."""

    def __init__(self, message: str, *, kind: str | None = None, blame: Blame | None = None) -> None:
        self.kind = kind or self.kind
        self.blame = blame or self.blame
        super().__init__(message)

    def __reduce__(self) -> Any:
        import copyreg

        # by `__new__`: an exception's own way would call `__init__` with the message alone
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class SpecError(EngineError):
    """A spec that cannot be loaded or is invalid."""

    kind = "spec_error"
    blame: Blame = "spec"

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = list(diagnostics)
        super().__init__("\n".join(str(d) for d in self.diagnostics))


class RenderError(EngineError):
    """Messages cannot become this model's tokens. Kind `bridge_error`: no exact continuation of the tape exists."""

    kind = "render_error"
    blame: Blame = "spec"


class ImageError(EngineError):
    """An image cannot be shown to the model, or placeholders and images do not match.

    Kinds: `image_unreadable`, `image_empty`, `image_too_large`, `image_refused` (by the model's own processor),
    `too_many_images`, `image_placeholder` (text contains one), `sampled_placeholder` (the model wrote one),
    `image_mismatch` (placeholders do not match the images), `image_missing` (the run store does not have it).
    """

    blame: Blame = "environment"


class LedgerError(EngineError):
    """A reward event cannot be carried out."""

    kind = "ledger_error"
    blame: Blame = "spec"


class GuardError(EngineError):
    """A guard failed on real values."""

    kind = "guard_error"
    blame: Blame = "spec"


class BackendError(EngineError):
    """A backend gave no answer or an invalid one."""

    kind = "backend_error"
    blame: Blame = "backend"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        retryable: bool = False,
        refused: bool = False,
        retry_after: float | None = None,
    ) -> None:
        """
        Args:
            message: what happened and what to do about it.
            kind: the failure's kind.
            retryable: a retry may succeed.
            refused: no server processed the request, so it does not count as a try; it may be sent again later.
            retry_after: seconds after which the server asks for a retry.
        """
        super().__init__(message, kind=kind)
        self.retryable = retryable
        self.refused = refused
        self.retry_after = retry_after


class ContextOverflow(BackendError):
    """The prompt and the reply do not fit the model's context."""

    kind = "context_overflow"


class OutageError(BackendError):
    """No server is reachable: none at the start (kind `unreachable`), or none has replied for `backend.wait`
    (kind `outage`)."""

    stops_run = True


class FailingError(EngineError):
    """The first episodes of a run all failed in the same way. `cause` is their failure, with its place in the spec."""

    kind = "failing"
    stops_run = True

    def __init__(self, message: str, cause: str) -> None:
        self.cause = cause
        super().__init__(message)


class SpecCodeError(EngineError):
    """Code that the spec names (an environment, a tool, a user, …) raised, did not answer in time, or gave an invalid
    answer."""

    def __init__(self, message: str, *, blame: Blame, kind: str, trace: str | None = None) -> None:
        super().__init__(message, kind=kind, blame=blame)
        self.trace = trace


class AdapterError(EngineError):
    """An adapter's library is missing, or answered in another form than the library documents."""

    kind = "adapter_error"
    blame: Blame = "environment"


class StoreError(EngineError):
    """A run cannot be read or written. Kind `dropped`: an episode's content was dropped from it to save space."""

    kind = "store_error"


class ReplayError(EngineError):
    """Replaying a journal gives other transitions than it records."""

    kind = "replay_error"


class AuditError(EngineError):
    """Rows of another framework cannot be read: the file is damaged, too large, or not of that framework's form."""

    kind = "audit_rows"


class TrainError(EngineError):
    """Training cannot start or continue.

    Kinds: `train_setup` (the spec, model or device does not allow it), `weights_not_taken` (a backend does not sample
    with the weights that were sent to it), `diverged` (loss or gradient is not finite), `no_data` (no group has a
    learning signal), `checkpoint` (cannot be read or written), `handover` (rows were lost or changed on the way to
    another trainer), `untrainable` (another trainer asked for an episode that cannot be trained on).
    """

    kind = "train_setup"


def first_of(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception of a group of exceptions, which may be nested."""
    first = several.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first
