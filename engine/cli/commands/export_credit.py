"""Options of `engine export` that change credit: `--credit` and `--values`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.schemas.credit import CreditSpec
    from engine.store.reader import RunReader


def changed_credit(store: RunReader, score: str | None, changes: list[str]) -> CreditSpec:
    """Return the credit method of the run or the score, with changes; another `method` begins with its own defaults.

    Raises:
        StoreError: a change is not KEY=VALUE, or the method does not take it.
    """
    from pydantic import ValidationError

    from engine.errors import StoreError
    from engine.schemas.credit import CreditSpec, read_credit
    from engine.spec.text.places import fields_by_key, tagged
    from engine.store.rows.build import credit_of

    values = credit_of(store, score).model_dump(by_alias=True)
    given: dict[str, str] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise StoreError(f"--credit {change}: write KEY=VALUE, such as method=turn_return")
        given[key] = value
    model = tagged(CreditSpec, "method").get(given.get("method", values["method"]))
    try:
        kept = {key: value for key, value in values.items() if model is None or key in fields_by_key(model)}
        return read_credit(kept | given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:])) or "method"
        keys = sorted(fields_by_key(model), key=lambda key: key != "method") if model is not None else []
        known = f" (keys: {', '.join(keys)})" if keys else ""
        raise StoreError(f"--credit {place}: {first['msg']}{known}") from None


def read_values(path: Path) -> dict[str, list[list[float]]]:
    """Read a critic's values, by episode.

    Raises:
        StoreError: the file cannot be read, or a line has another form.
    """
    import orjson

    from engine.errors import StoreError

    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    values: dict[str, list[list[float]]] = {}
    for number, line in enumerate(lines, 1):
        try:
            episode = orjson.loads(line)
            values[str(episode["episode_id"])] = [[float(value) for value in turn] for turn in episode["values"]]
        except (ValueError, KeyError, TypeError) as error:
            form = '{"episode_id": "t/0", "values": [[0.1, 0.2], [0.3]]}'
            raise StoreError(f"{path}:{number}: {error!r}; a line is {form}") from error
    return values
