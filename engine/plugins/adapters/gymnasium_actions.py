"""Actions of Gymnasium's spaces, written as text: which spaces can be written, an example, and the way back.

An action is written as a Python literal: `2`, `[0.5, -1.0]`, `{'move': 1, 'say': 'hi'}`. Lists stand for arrays and for tuples.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

PLAIN = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text")
"""The spaces of Gymnasium whose elements can be written, beside `Dict` and `Tuple` of such spaces."""


def unwritable(space: Any, spaces: Any, at: str = "") -> Iterator[str]:
    """The parts of a space whose elements cannot be written, each with its place.

    Args:
        space: The space.
        spaces: The module `gymnasium.spaces`.
        at: The place of the space in a larger one.
    """
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from unwritable(part, spaces, f"{at}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from unwritable(part, spaces, f"{at}[{index}]")
    elif not isinstance(space, tuple(getattr(spaces, name) for name in PLAIN)):
        yield f"{type(space).__name__}{f' at {at}' if at else ''}"


def read_action(text: str, space: Any, spaces: Any) -> Any:
    """The element of a space that a text names.

    Raises:
        ValueError: it names none.
    """
    if isinstance(space, spaces.Text):
        value: Any = text
    else:
        try:
            value = as_element(space, ast.literal_eval(text), spaces)
        except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None
    if not space.contains(value):
        raise ValueError(f"not in {space}")
    return value


def as_element(space: Any, value: Any, spaces: Any) -> Any:
    """A literal with the types that a space checks for: arrays for `Box`, `MultiDiscrete` and `MultiBinary`, tuples for `Tuple`.

    Raises:
        ValueError: it has other parts than the space, a number would be rounded, or one is not finite.
        TypeError: it has another form.
        KeyError: it has a part that the space does not have.
    """
    if isinstance(space, spaces.Dict):
        return {key: as_element(space.spaces[key], item, spaces) for key, item in dict(value).items()}
    if isinstance(space, spaces.Tuple):
        return tuple(as_element(part, item, spaces) for part, item in zip(space.spaces, value, strict=True))
    if not isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return value
    import numpy as np

    given = np.asarray(value)
    if given.dtype.kind not in "biuf" or not np.isfinite(given).all():
        raise ValueError("an array needs finite numbers")
    cast = given.astype(space.dtype)
    if cast.dtype.kind != "f" and not (cast == given).all():
        raise ValueError(f"numbers of the type {space.dtype} are needed")
    return cast


def example_of(space: Any) -> str:
    """An element of a space as text; the same one each time. The space's own random numbers are not drawn."""
    fresh = copy.deepcopy(space)
    fresh.seed(0)
    return repr(rounded(fresh.sample()))


def rounded(value: Any) -> Any:
    """An element with plain Python values; floats have at most two decimals, where they stay in their space mostly."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(rounded(item) for item in value)
    if isinstance(value, float):
        return round(value, 2) if math.isfinite(value) else value
    return rounded(value.tolist()) if hasattr(value, "tolist") else value
