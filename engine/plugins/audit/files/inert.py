"""Reads pickles without executing them: every class and function in a pickle becomes an inert record.

    read_pickle(data).state          # what a `DataProto` would have restored itself from

A pickle is a program that can call any function it names. Here no name is imported: `find_class` gives a new subclass of
`Inert`, which only keeps the arguments and the state that it is given. The interpreter is the one of the standard library that is written in Python: the one in C
allocates memory by numbers in the file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from engine.errors import AuditError

MAX_NAMES = 10_000
"""Maximum number of different classes and functions in a pickle."""


class Inert:
    """An object of a pickle: the name of its class or function, its arguments, state, items and pairs. It does nothing."""

    name: ClassVar[str] = ""
    """`module.name` as the pickle has it."""

    args: tuple[Any, ...]
    state: Any
    items: list[Any]
    pairs: dict[Any, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        self = object.__new__(cls)
        self.args = args
        self.state = kwargs or None
        self.items = []
        self.pairs = {}
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """A list of a subclass gets an item."""
        self.items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        """A list of a subclass gets items."""
        self.items.extend(items)

    def add(self, item: Any) -> None:
        """A set of a subclass gets an item."""
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs[key] = value

    def __repr__(self) -> str:
        return f"<{self.name}>"


class _Unpickler(pickle._Unpickler):
    """The standard library's interpreter of pickles, with inert names."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    read: Callable[[int], bytes]
    append: Callable[[Any], None]

    def __init__(self, data: bytes, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data), encoding="latin-1")
        self._size = len(data)
        self._persistent = persistent
        self._names: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> type[Inert]:
        """A stand-in for a class or function."""
        whole = f"{module}.{name}"
        if whole not in self._names:
            if len(self._names) >= MAX_NAMES:
                raise AuditError(f"the pickle names more than {MAX_NAMES:,} classes and functions")
            self._names[whole] = type("Inert", (Inert,), {"name": whole})
        return self._names[whole]

    def persistent_load(self, key: Any) -> Any:
        """What torch keeps beside the pickle: a tensor's bytes."""
        if self._persistent is None:
            raise AuditError("the pickle refers to data outside of it, and there is none")
        return self._persistent(key)

    def get_extension(self, code: int) -> None:
        """Numbers of the pickling program's own registry mean nothing here."""
        raise AuditError("the pickle uses `copyreg` extensions, which only the program that wrote it knows")

    def _buffer(self) -> None:
        """`BYTEARRAY8`: the standard library allocates the size before it reads."""
        size = int.from_bytes(self.read(8), "little")
        if size > self._size:
            raise AuditError(f"an instruction asks for {size:,} bytes of a pickle of {self._size:,}")
        self.append(self.read(size))


def _with_plain_keys(opcode: bytes, step: int) -> Callable[[Any], None]:
    """An instruction that makes keys. Tuples are refused: a deeply nested one would overflow the stack when it is hashed.

    Args:
        opcode: The instruction.
        step: 2 where keys and values take turns on the stack, 1 where there are only keys.
    """
    run = pickle._Unpickler.dispatch[opcode[0]]

    def checked(self: Any) -> None:
        if any(isinstance(key, tuple | frozenset) for key in self.stack[::step]):
            raise AuditError("the pickle has tuples or sets as keys, which no rows need")
        run(self)

    return checked


_Unpickler.dispatch[pickle.BYTEARRAY8[0]] = _Unpickler._buffer
for _opcode, _step in ((pickle.SETITEMS, 2), (pickle.DICT, 2), (pickle.ADDITEMS, 1), (pickle.FROZENSET, 1)):
    _Unpickler.dispatch[_opcode[0]] = _with_plain_keys(_opcode, _step)


def _set_item(self: Any) -> None:
    if isinstance(self.stack[-2], tuple | frozenset):
        raise AuditError("the pickle has tuples or sets as keys, which no rows need")
    pickle._Unpickler.dispatch[pickle.SETITEM[0]](self)


_Unpickler.dispatch[pickle.SETITEM[0]] = _set_item


def read_pickle(data: bytes, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return a pickle's object, with inert records in place of everything that is not a plain value.

    Args:
        data: The pickle.
        persistent: Gives the value of a persistent id, as torch's files have them.

    Raises:
        AuditError: It is not a pickle, is damaged, or exceeds a limit.
    """
    try:
        return _Unpickler(data, persistent).load()
    except AuditError:
        raise
    except (MemoryError, RecursionError) as error:
        raise AuditError(
            f"the pickle needs too much memory or is nested too deeply ({type(error).__name__})"
        ) from error
    except Exception as error:
        raise AuditError(f"not a readable pickle ({type(error).__name__}: {str(error)[:200]})") from error


def named(value: Any, *endings: str) -> bool:
    """Whether a value is an inert record of a class or function with one of these last names."""
    return isinstance(value, Inert) and value.name.rpartition(".")[2] in endings


def inside(value: Any) -> Iterator[Any]:
    """The values directly inside an inert record: arguments, state, items, pairs."""
    if isinstance(value, Inert):
        yield from value.args
        yield value.state
        yield from value.items
        yield from value.pairs.values()
