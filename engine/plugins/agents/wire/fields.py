"""Reads the parts that requests of all model APIs have in common: sampling, tools, images, texts.

Invariant: each field of a request has its effect, or is known to have none on the reply, or is decided by the spec and
reported (`overruled`), or the request is refused with the field's name. No field is ignored silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field, PlainValidator, TypeAdapter, ValidationError

from engine.plugins.agents.wire.requests import ApiError, ModelRequest, Session
from engine.schemas.base import Struct
from engine.schemas.message import ContentPart, ImagePart, Message, TextPart, ToolCall
from engine.storable import refusal

_ID = re.compile(r"[\x21-\x7e]{1,256}")
_MOST_STOPS = 16


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise ValueError
    if not all(isinstance(item, str) and item and refusal(item) is None for item in stops):
        raise ValueError
    return stops


_ABOVE_0: Any = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
_PENALTY: Any = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-2, le=2)]
SAMPLING: Mapping[str, tuple[str, TypeAdapter[Any]]] = {
    "temperature": (
        "a number from 0 to 2",
        TypeAdapter(Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=2)]),
    ),
    "top_p": (
        "a number above 0, at most 1",
        TypeAdapter(Annotated[float, Field(strict=True, allow_inf_nan=False, ge=1e-6, le=1)]),
    ),
    "top_k": ("an integer of at least 1", TypeAdapter(_ABOVE_0)),
    "frequency_penalty": ("a number from -2 to 2", TypeAdapter(_PENALTY)),
    "presence_penalty": ("a number from -2 to 2", TypeAdapter(_PENALTY)),
    "max_tokens": ("an integer of at least 1", TypeAdapter(_ABOVE_0)),
    "stop": (
        f"a text, or a list of at most {_MOST_STOPS} texts, none empty",
        TypeAdapter(Annotated[Any, PlainValidator(_stops)]),
    ),
}
"""By name in `agent.allow`: what a value must be, and what reads it."""
REFUSED_UNLESS_ALLOWED = frozenset({"stop"})
"""Without this parameter a reply means something else, so a request that sets it is refused where the spec does not
allow it."""


class Fields(Struct, frozen=True, kw_only=True):
    """The top-level fields of an API's requests."""

    handled: frozenset[str]
    """Those that the API's own code reads."""
    without_effect: frozenset[str]
    """Those that change nothing of the reply."""
    sampling: Mapping[str, str]
    """Those of sampling, by their names in `agent.allow`."""
    decided: frozenset[str] = frozenset()
    """Those that only the spec decides."""
    neutral: Mapping[str, tuple[Any, ...]] = msgspec.field(default_factory=dict)
    """Those that are supported only with values that change nothing; null is one of them."""
    ignorable: frozenset[str] = frozenset()
    """Of `neutral`: those that `agent.ignore` may name."""


class Reader:
    """Reads one request.

    Args:
        body: Its JSON value.
        fields: The API's fields.
        session: What it is read with.

    Raises:
        ApiError: A field is not supported or has an invalid value, or the model is another one.
    """

    def __init__(self, body: Any, fields: Fields, session: Session) -> None:
        if not isinstance(body, dict):
            raise ApiError("the body must be a JSON object")
        self.body: dict[str, Any] = body
        self.session = session
        self.sampling: dict[str, Any] = {}
        self.overruled: set[str] = set()
        """The fields that are set and have no effect, because the spec decides."""
        for name, value in body.items():
            if value is None or name in fields.handled or name in fields.without_effect:
                continue
            if name in fields.sampling:
                self._sample(name, value, fields.sampling[name])
            elif name in fields.decided:
                self.overruled.add(name)
            elif name in fields.neutral:
                self.neutral(name, value, fields.neutral[name], name if name in fields.ignorable else "")
            else:
                raise ApiError(f"`{name}` is not supported: leave it out", param=name)
        if body.get("model") != session.model:
            text = f"the model {body.get('model')!r} does not exist; the only model is {session.model!r}"
            raise ApiError(text, param="model", status=404, code="model_not_found")

    def neutral(self, at: str, value: Any, allowed: Collection[Any], ignorable: str = "", reported: str = "") -> None:
        """Refuse a value that would change the reply (not null or `allowed`), unless the spec ignores the field.

        `ignorable` is its name in `agent.ignore`, `reported` its name in `overruled`, if that is not the field.
        """
        if value is None or any(value == item and type(value) is type(item) for item in allowed):
            return
        if ignorable in self.session.ignore:
            self.overruled.add(reported or at)
            return
        only = " or ".join(json.dumps(item) for item in allowed)
        text = (
            f"`{at}` is supported only as {only}: leave it out" if allowed else f"`{at}` is not supported: leave it out"
        )
        if ignorable:
            text += f", or write `ignore: [{ignorable}]` in the spec's `agent` to answer as if it were left out"
        raise ApiError(text, param=at)

    def _sample(self, name: str, value: Any, parameter: str) -> None:
        if parameter in REFUSED_UNLESS_ALLOWED and value in ([], ""):
            return
        if parameter in self.session.allow:
            expected, read = SAMPLING[parameter]
            try:
                self.sampling[parameter] = read.validate_python(value)
            except ValidationError:
                raise ApiError(f"`{name}` must be {expected}", param=name) from None
        elif parameter in REFUSED_UNLESS_ALLOWED and parameter not in self.session.ignore:
            text = f"`{name}` is not supported: leave it out, or write `allow: [{parameter}]` in the spec's `agent`"
            raise ApiError(text, param=name)
        else:
            self.overruled.add(name)

    def flag(self, name: str, inside: Mapping[str, Any] | None = None) -> bool:
        """Read true, false or null."""
        value = (self.body if inside is None else inside).get(name)
        if value is not None and not isinstance(value, bool):
            raise ApiError(f"`{name}` must be true or false", param=name)
        return bool(value)

    def logprobs(self, at: str, *, asked: bool) -> bool:
        """Whether the field `at` asks for log-probs.

        Raises:
            ApiError: There are none, or it asks for those of tokens that were not sampled.
        """
        top = self.body.get("top_logprobs")
        if top is not None and (type(top) is not int or top != 0):
            text = "`top_logprobs` must be 0: the log-probs of sampled tokens are known, and of no others; leave it out"
            raise ApiError(text, param="top_logprobs")
        if asked and not self.session.logprobs:
            raise ApiError(f"`{at}`: the backend of the spec gives no log-probs: leave it out", param=at)
        return asked

    def request(
        self,
        messages: list[Message],
        tool: Callable[[dict[str, Any], str], dict[str, Any]],
        replies: int = 1,
        *,
        logprobs: bool = False,
    ) -> ModelRequest:
        """Return the request; `tool` reads one of its tools.

        Raises:
            ApiError: A tool or `stream` has an invalid value.
        """
        tools = [tool(item, at) for at, item in objects(self.body.get("tools"), "tools")]
        names = [schema["function"]["name"] for schema in tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ApiError(f"`tools` has two tools with the name {twice!r}", param="tools")
        return ModelRequest(
            messages=messages,
            tools=tools,
            replies=replies,
            stream=self.flag("stream"),
            sampling=self.sampling,
            overruled=sorted(self.overruled),
            body=self.body,
            logprobs=logprobs,
        )

    def tool(
        self, at: str, definition: Mapping[str, Any], parameters: str, without_effect: frozenset[str]
    ) -> dict[str, Any]:
        """Read one tool to its schema in OpenAI's form; `parameters` is the key of its JSON schema."""
        self.neutral(f"{at}.strict", definition.get("strict"), (False,), "strict")
        keys = without_effect | {"name", "description", "strict", parameters}
        if other := next((key for key, value in definition.items() if key not in keys and value), None):
            raise ApiError(f"`{at}.{other}` is not supported: leave it out", param=f"{at}.{other}")
        name, description = identifier(definition.get("name"), f"{at}.name"), definition.get("description")
        schema = definition.get(parameters)
        if description is not None and (not isinstance(description, str) or refusal(description) is not None):
            raise ApiError(f"`{at}.description` must be a text", param=f"{at}.description")
        if schema is not None and (not isinstance(schema, dict) or refusal(schema) is not None):
            raise ApiError(f"`{at}.{parameters}` must be a JSON schema", param=f"{at}.{parameters}")
        shape = schema or {"type": "object", "properties": {}}
        function = {"name": name, "description": description or "", "parameters": shape}
        return {"type": "function", "function": function}


def objects(value: Any, at: str) -> list[tuple[str, dict[str, Any]]]:
    """Read a list of objects, each with its place; null is the empty list."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ApiError(f"`{at}` must be a list", param=at)
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise ApiError(f"`{at}[{number}]` must be an object", param=f"{at}[{number}]")
    return [(f"{at}[{number}]", item) for number, item in enumerate(value)]


def identifier(value: Any, at: str) -> str:
    """Read an id or a name."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ApiError(f"`{at}` must be a text of 1 to 256 printable characters", param=at)
    return value


def text(value: Any, at: str) -> str:
    """Read a text that can be stored."""
    if not isinstance(value, str) or refusal(value) is not None:
        raise ApiError(f"`{at}` must be a text", param=at)
    return value


def content(
    value: Any, at: str, part: Callable[[dict[str, Any], str], ContentPart | None], *, null: bool = True
) -> str | list[ContentPart]:
    """Read a content: a text, or parts if it has an image. Null is the empty text; `part` skips a part by None."""
    if isinstance(value, str):
        return text(value, at)
    if value is None and not null:
        raise ApiError(f"`{at}` is missing", param=at)
    parts = [read for place, item in objects(value, at) if (read := part(item, place)) is not None]
    return joined(parts)


def content_part(
    item: dict[str, Any],
    at: str,
    *,
    texts: Sequence[str] = ("text",),
    images: Mapping[str, Callable[[dict[str, Any], str], ImagePart]] | None = None,
) -> ContentPart:
    """Read a part of a content.

    Args:
        item: The part.
        at: Its place.
        texts: Types of parts with a `text`.
        images: What reads an image, by the type of its part; None: there may be no image.
    """
    kind = item.get("type")
    if kind in texts:
        return TextPart(text=text(item.get("text"), f"{at}.text"))
    if not images or kind not in [*images]:
        raise ApiError(f"`{at}` has the type {kind!r}, which is not supported here", param=at)
    return images[kind](item, at)


def joined(parts: list[ContentPart]) -> str | list[ContentPart]:
    """Parts as a content: one text if there is no image."""
    if any(isinstance(item, ImagePart) for item in parts):
        return parts
    return "".join(item.text for item in parts if isinstance(item, TextPart))


def image(url: Any, at: str) -> ImagePart:
    """Read an image, which must be a `data:` URI."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ApiError(f"`{at}` must be a data: URI", param=at)
    return ImagePart(image=url)


def call(id_: Any, name: Any, written: Any, at: str, keys: tuple[str, str, str]) -> ToolCall:
    """Read a call of a tool. Its arguments are an object, or its JSON; null and the empty text are no arguments.

    `keys` are its keys of id, name and arguments, for messages.
    """
    id_, name = identifier(id_, f"{at}.{keys[0]}"), identifier(name, f"{at}.{keys[1]}")
    try:
        arguments = json.loads(written or "{}") if isinstance(written, str) or written is None else written
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or refusal(arguments) is not None:
        raise ApiError(f"`{at}.{keys[2]}` must be the JSON of an object", param=f"{at}.{keys[2]}")
    return ToolCall(id=id_, name=name, arguments=arguments)
