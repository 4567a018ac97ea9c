"""Test requests to SGLang, and what a router is in the way of.

The parameters that a router drops are found with requests that SGLang must refuse: a normal answer means that the
parameter was dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from engine.errors import BackendError, OutageError
from engine.plugins.servers.checks import ask
from engine.plugins.servers.http.reply import HttpReply, error_text
from engine.plugins.servers.pool import Server
from engine.plugins.sglang.wire import SGLANG
from engine.schemas.generation import SamplingParams

if TYPE_CHECKING:
    from engine.plugins.sglang.spec import SGLangBackendSpec

log = structlog.get_logger(__name__)

EXPERTS_FLAG = "--enable-return-routed-experts"
"""SGLang's flag of servers that report the experts of each token."""
_REFUSED: dict[str, Any] = {
    "sampling_seed": 2**63,
    "logit_bias": {"2147483647": 0.0},
    "stop_regex": ["x" * 300],
    "custom_params": {"__sglang_reasoning_end_token_ids": []},
    "stop": [f"stop {number}" for number in range(40)],
    "min_new_tokens": 9,
    "top_p": 2.0,
    "min_p": 2.0,
    "frequency_penalty": 9.0,
    "presence_penalty": 9.0,
    "repetition_penalty": 9.0,
}
"""Parameter -> a value for which SGLang refuses a request for one token."""
_EXPERTS_PROBE = {"input_ids": [0, 0], "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": True}
"""A request whose reply has the routed experts."""


async def ask_worker(server: Server, body: dict[str, Any] | bytes) -> HttpReply:
    """Send a test request to `/generate`; see `ask`."""
    return await ask(server, SGLANG.path, body)


async def workers_of(routers: list[Server], headers: dict[str, str]) -> list[Server]:
    """The servers behind the routers. Control calls go to them, because a router refuses such calls.

    Raises:
        OutageError: No router can be reached.
        BackendError: One of them refuses, or has no servers.
    """
    urls: list[str] = []
    for router in routers:
        try:
            listed = await router.json("GET", "/workers")
        except BackendError as error:
            if error.refused:
                raise OutageError(f"no sglang server can be reached: {error}", kind="unreachable") from None
            raise
        rows: list[Any] = (listed.get("workers") or listed.get("urls") or []) if isinstance(listed, dict) else listed
        urls += [row if isinstance(row, str) else row["url"] for row in rows]
    if not urls:
        names = ", ".join(router.url for router in routers)
        raise OutageError(f"the router at {names} has no workers; start them first", kind="unreachable")
    return [Server(url, headers) for url in dict.fromkeys(urls)]


async def dropped_by(routers: list[Server], sampling: SamplingParams, spec: SGLangBackendSpec) -> list[str]:
    """The parameters that the routers drop.

    Raises:
        BackendError: The spec sets one of them, or a router answers with an error.
    """
    dropped: set[str] = set()
    probes = {name: SGLANG.test_body(**{name: value}) for name, value in _REFUSED.items()}
    probes[SGLANG.adapter] = SGLANG.test_body() | {SGLANG.adapter: "there-is-no-such-adapter"}
    for router in routers:
        for name, body in probes.items():
            if (await ask_worker(router, body)).status == 200:
                dropped.add(name)
        reply = await ask_worker(router, SGLANG.test_body() | {SGLANG.echo: True})
        if reply.status != 200:
            raise BackendError(
                f"the router {router.url} answered {reply.status}: {error_text(reply)}", kind="wrong_server"
            )
        if b'"prompt_token_ids"' not in reply.body:
            dropped.add(SGLANG.echo)
        if spec.asks_experts and b'"routed_experts"' not in (await ask_worker(router, _EXPERTS_PROBE)).body:
            dropped.add("return_routed_experts")
    used = (
        set(SGLANG.sampling_fields(sampling))
        | ({SGLANG.adapter} if spec.adapter else set())
        | {"return_routed_experts"}
    )
    needed = sorted(dropped & used)
    if needed:
        raise BackendError(
            f"the router does not pass on {', '.join(needed)}, which this spec sets: "
            "name the servers themselves in `urls` and leave `router` out",
            kind="bad_sampling",
        )
    if dropped:
        log.warning(
            "the router drops parameters; prompts are not compared where return_prompt_token_ids is among them",
            dropped=sorted(dropped),
        )
    return sorted(dropped)
