"""Checks of a request before it is queued."""

from __future__ import annotations

from engine.errors import BackendError, ContextOverflow
from engine.schemas.generation import GenerateRequest


def tokens_to_sample(request: GenerateRequest, *, rows: int, context: int | None) -> int:
    """Check a request. Returns the maximum number of tokens to sample.

    Args:
        request: The request.
        rows: Number of rows of the embedding; token ids are below it.
        context: Maximum length of a sequence in tokens.

    Raises:
        ContextOverflow: Not one token fits after the prompt.
        BackendError: Kind `bad_request` or `unsupported_parameter`.
    """
    if request.adapter is not None:
        raise BackendError(
            "the local backend does not support adapters: merge the adapter into the model",
            kind="unsupported_parameter",
        )
    ids = request.input_ids
    if not len(ids):
        raise BackendError("the prompt is empty: send at least one token", kind="bad_request")
    if int(ids.min()) < 0 or int(ids.max()) >= rows:
        raise BackendError(f"the prompt has ids outside the model's vocabulary [0, {rows})", kind="bad_request")
    for name, wrong in (
        ("logit_bias", [int(token) for token in request.sampling.logit_bias or {}]),
        ("banned_token_ids", request.banned_token_ids),
    ):
        if bad := [token for token in wrong if not 0 <= token < rows]:
            raise BackendError(
                f"`{name}` has id {bad[0]}, outside the model's vocabulary [0, {rows})", kind="bad_request"
            )
    most = min(request.max_new_tokens, request.sampling.max_new_tokens or request.max_new_tokens)
    if context is None:
        return most
    if len(ids) + 1 > context:
        raise ContextOverflow(f"the prompt has {len(ids)} tokens, and the model's context is {context} tokens")
    return min(most, context - len(ids))
