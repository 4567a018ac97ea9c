"""A row of any source -> JSON values, and a dotted name -> its value in a row.

Invariant: what `plain` returns is JSON, except for values that it does not know, which `engine.storable.refusal` refuses.
An image becomes a reference that `engine.schemas.message.ImagePart` takes: a path, or a `data:` URI with the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from pydantic_core import to_jsonable_python

from engine.schemas.message import image_part

_STRUCT = frozenset({"bytes", "path"})
"""The keys of an image as Hugging Face stores it in Parquet and Arrow files."""
_NO_IMAGE = "data:application/octet-stream"


def find(name: str, fields: Mapping[str, Any]) -> tuple[bool, Any]:
    """(whether it is there, the value) of a dotted name: `reward_model.ground_truth`, `images.0`.

    A field that is itself called `a.b` comes before the key `b` of the field `a`.
    """
    if name in fields:
        return True, fields[name]
    value: Any = fields
    for key in name.split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and key.isdigit() and len(key) < 10:
            if int(key) >= len(value):
                return False, None
            value = value[int(key)]
        else:
            return False, None
    return True, value


def plain(value: Any) -> Any:
    """A row's value as JSON.

    Dates, times and decimals become text. The bytes of an image file, a PIL image and the struct `{bytes, path}` become image
    references. Everything else stays as it is.
    """
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == _STRUCT:
            return _image(value)
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, date | time | timedelta | Decimal):
        return to_jsonable_python(value)
    if isinstance(value, bytes) or (callable(getattr(value, "save", None)) and hasattr(value, "convert")):
        return _reference(value)
    return value


def _image(struct: Mapping[str, Any]) -> Any:
    data = struct["bytes"]
    if isinstance(data, bytes) and data:
        return _reference(data)
    return struct["path"] if data is None or data == b"" else {key: plain(item) for key, item in struct.items()}


def _reference(image: Any) -> Any:
    """A `data:` URI; bytes that are no image stay bytes, which are refused."""
    found = image_part(image).image
    return image if found.startswith(_NO_IMAGE) else found
