"""Pushes a data set to the Hugging Face hub: `engine export --push owner/name`.

Invariant: the hub has the whole file with its card in one commit, or what it had before. A data set that this push
created and could not fill is deleted again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import StoreError
from engine.masking import mask

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TOKEN = "HF_TOKEN"
"""The variable with the token; nothing else is read."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_CARD = """---
configs:
- config_name: {content}
  data_files:
  - split: train
    path: data/*-{content}.parquet
tags:
- episode-engine
---
Episodes of the run `{run_id}`, exported by episode-engine {version} as `{content}`.
"""


def check_push(name: str) -> None:
    """Check what a push needs, before anything is written.

    Raises:
        StoreError: the id is not `owner/name`, the client is not installed, or there is no token.
    """
    if _ID.fullmatch(name) is None:
        raise StoreError(f"--push {name}: not the id of a data set; write OWNER/NAME, such as my-team/sums")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise StoreError("--push needs the package huggingface_hub: pip install 'episode-engine[hub]'") from error
    if not os.environ.get(TOKEN):
        raise StoreError(f"--push needs a token that may write, in the environment variable {TOKEN}")


def push_file(path: Path, name: str, *, rows: int, public: bool, run_id: str, content: str) -> str:
    """Upload a file of rows to a data set in one commit, and return the address of the data set.

    Args:
        path: The Parquet file.
        name: `owner/name`.
        rows: Number of its rows; a file without rows is not pushed.
        public: A new data set is public, and pushing to a public one is allowed.
        run_id: The run. The file in the data set is named after it.
        content: What a row is.

    Raises:
        StoreError: the hub refuses or cannot be reached, or the data set is public and `public` is not set. Nothing was
            changed.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    import engine

    if not rows:
        raise StoreError(f"{path} has no rows: nothing is pushed to {name}")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    api = HfApi(
        endpoint=endpoint, token=os.environ[TOKEN], library_name="episode-engine", library_version=engine.__version__
    )
    with _explained(api, name):
        api.whoami()
        try:
            before = api.dataset_info(name)
        except RepositoryNotFoundError:
            before = None
    if before is not None and not before.private and not public:
        raise StoreError(
            f"the data set {name} is public; add --public to push the run's conversations to it. Nothing is pushed"
        )
    with _explained(api, name):
        if before is None:
            api.create_repo(name, repo_type="dataset", private=not public)
    operations = [CommitOperationAdd(f"data/{run_id}-{content}.parquet", path)]
    has_card = before is not None and any(file.rfilename == "README.md" for file in before.siblings or [])
    if not has_card:
        card = _CARD.format(content=content, run_id=run_id, version=engine.__version__)
        operations.append(CommitOperationAdd("README.md", card.encode()))
    try:
        with _explained(api, name):
            api.create_commit(
                name,
                operations,
                repo_type="dataset",
                commit_message=f"Add {rows} rows of {run_id}",
                parent_commit=None if before is None else before.sha,
            )
    except StoreError as error:
        if before is None:
            raise StoreError(f"{error}; {_removed(api, name)}") from error
        raise
    return f"{api.endpoint}/datasets/{name}"


def _removed(api: HfApi, name: str) -> str:
    """Delete the data set that was just created, and say whether that succeeded."""
    try:
        with _explained(api, name):
            api.delete_repo(name, repo_type="dataset", missing_ok=True)
    except StoreError:
        return f"the empty data set {name} was created and could not be deleted again: delete it"
    return f"the data set {name}, which was created for it, is deleted again"


_ADVICE = {
    401: f"the token in {TOKEN} is not valid: make one at the hub's settings, with the right to write",
    403: f"the token in {TOKEN} may not do this: it needs the right to write to this data set's owner",
    404: "there is no such data set, or the token may not read it",
    409: "it was changed, or created, at the same time: push again",
    412: "it was changed at the same time: push again",
    413: "the file is too large for the hub",
    429: "too many requests: push again later",
}


@contextmanager
def _explained(api: HfApi, name: str) -> Iterator[None]:
    """Convert errors of the client to a StoreError that says what to do. The token is in no message."""
    from huggingface_hub import errors
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    transport: type[Exception] = getattr(errors, "HTTPError", OSError)  # of the HTTP client that this version has
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        said = _ADVICE.get(status) or mask(str(error.server_message or error).splitlines()[0])
        raise StoreError(f"the hub refused the push to {name} with status {status}: {said}") from error
    except OfflineModeIsEnabled as error:
        raise StoreError(f"nothing is pushed to {name}: HF_HUB_OFFLINE is set") from error
    except (transport, OSError) as error:
        raise StoreError(
            f"nothing is pushed to {name}: {api.endpoint} cannot be reached ({type(error).__name__})"
        ) from error
    except ValueError as error:  # an answer that is not the hub's
        raise StoreError(
            f"nothing is pushed to {name}: {api.endpoint} does not answer as a hub: {mask(str(error))}"
        ) from error
