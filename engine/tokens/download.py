"""Images of prompts that are given by URL: downloaded once an episode, when it begins.

Only prompts are downloaded: their URLs are the spec's and its rows'. What a tool, an environment or a user says may repeat
the policy's words, so its URLs are never requested.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

SECONDS = 30.0
"""Time to connect, and time between two pieces of the body."""
ATTEMPTS = 3
"""How often an image is requested, if the server fails (5xx, 429) or the connection breaks."""
REDIRECTS = 5


def download(url: str, most: int) -> bytes:
    """The body of a URL.

    Args:
        url: `http://` or `https://`.
        most: Largest size, in bytes.

    Raises:
        ValueError: The server refuses, fails `ATTEMPTS` times, or sends more.
    """
    import httpx

    problem = ""
    with httpx.Client(timeout=SECONDS, follow_redirects=True, max_redirects=REDIRECTS) as client:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(0.25 * 2**attempt)
            try:
                with client.stream("GET", url) as reply:
                    if reply.status_code == 200:
                        return _body(reply.iter_bytes(), most)
                    problem = f"the server replies {reply.status_code} {reply.reason_phrase}".rstrip()
                    if reply.status_code < 500 and reply.status_code != 429:
                        break
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"{type(error).__name__}: {error}"
    raise ValueError(problem)


def _body(pieces: Iterator[bytes], most: int) -> bytes:
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) > most:
            raise ValueError(f"it is larger than {most >> 20} MiB")
    return bytes(body)
