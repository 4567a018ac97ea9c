"""Reads pickles and files of `torch.save` without executing them and without torch: classes and functions become inert
records, arrays NumPy arrays.

    read_pickle(data).state           # what a `DataProto` would have restored itself from
    plain(read_pickle(data))          # the same with arrays and plain values in place of their records
    read_torch(data)                  # the object of a file of `torch.save`: dicts, lists, arrays

A pickle is a program that can call any function it names. Here no name is imported: `find_class` gives a new subclass
of `Inert`, which only keeps the arguments and the state that it is given. The interpreter is the one of the standard
library that is written in Python: the one in C allocates memory by numbers in the file. Every array is checked against
the bytes that the file has for it before it is made.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from engine.errors import AuditError

MAX_NAMES = 10_000
"""Maximum number of different classes and functions in a pickle."""


class Inert:
    """An object of a pickle: the name of its class or function, its arguments, state, items and pairs. It does
    nothing."""

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

    add = append
    """A set of a subclass gets an item."""

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


def _with_plain_keys(run: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """An instruction that makes keys, which stand at these places of the stack. Tuples are refused: a deeply nested one
    would overflow the stack when it is hashed."""

    def checked(self: Any) -> None:
        if any(isinstance(key, tuple | frozenset) for key in self.stack[keys]):
            raise AuditError("the pickle has tuples or sets as keys, which no rows need")
        run(self)

    return checked


_Unpickler.dispatch[pickle.BYTEARRAY8[0]] = _Unpickler._buffer
for _opcode, _keys in (
    (pickle.SETITEM, slice(-2, -1)),
    (pickle.SETITEMS, slice(None, None, 2)),  # keys and values take turns
    (pickle.DICT, slice(None, None, 2)),
    (pickle.ADDITEMS, slice(None)),
    (pickle.FROZENSET, slice(None)),
):
    _Unpickler.dispatch[_opcode[0]] = _with_plain_keys(_Unpickler.dispatch[_opcode[0]], _keys)


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


MAX_DEPTH = 64
"""Maximum nesting of lists, dicts and objects."""
_NUMPY_TYPE = re.compile(r"[<>|=]?([biufUS])(\d{1,6})")
_TORCH_TYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "BFloat16": "bfloat16",
}
"""Torch's names of types, as in `LongStorage`."""
_NAMES = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32"}
_SIMPLE = set(_TORCH_TYPES.values()) | {"uint16", "uint32", "uint64"}


def array_of(data: bytes | memoryview, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of little-endian bytes.

    Raises:
        AuditError: The type is not a simple one, or the bytes are not those of the shape.
    """
    name = dtype.removeprefix("torch.")
    name = _NAMES.get(name, name)
    if name not in _SIMPLE:
        raise AuditError(f"arrays of type {dtype!r} are not read")
    stored = np.dtype("<u2" if name == "bfloat16" else name).newbyteorder("<")
    if any(not isinstance(size, int) or size < 0 for size in shape) or prod(shape) * stored.itemsize != len(data):
        raise AuditError(f"an array of shape {shape} and type {dtype} has {len(data):,} bytes")
    found = np.frombuffer(data, stored).reshape(shape)
    return (found.astype(np.uint32) << 16).view(np.float32) if name == "bfloat16" else found


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of a tensor's storage, and the type of its elements."""

    data: memoryview
    dtype: str

    def view(self, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> np.ndarray:
        """The tensor of a shape at an offset.

        Raises:
            AuditError: It reaches beyond the storage.
        """
        width = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        flat = array_of(self.data[: len(self.data) // width * width], self.dtype, (len(self.data) // width,))
        numbers = (offset, *size, *stride)
        if len(size) != len(stride) or any(not isinstance(n, int) or n < 0 for n in numbers):
            raise AuditError(f"a tensor has the shape {size} and the strides {stride}")
        if not prod(size):
            return np.empty(size, flat.dtype)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if last >= len(flat) or prod(size) > len(flat):
            raise AuditError(f"a tensor of shape {size} reaches beyond its {len(flat):,} stored elements")
        steps = tuple(step * flat.itemsize for step in stride)
        return np.lib.stride_tricks.as_strided(flat[offset:], size, steps, writeable=False).copy()


def read_torch(data: bytes) -> Any:
    """Return the object of a file of `torch.save`.

    Raises:
        AuditError: The file is damaged, of torch's old form (before 1.6), or exceeds a limit.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        names = archive.namelist()
        total = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise AuditError(f"not a readable file of torch.save ({error})") from error
    if total > 4 * len(data) + 65536:  # torch stores without compression
        raise AuditError(f"the archive of {len(data):,} bytes would unpack to {total:,}")
    pickles = [name for name in names if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise AuditError("the zip archive is not a file of torch.save: it has no `data.pkl`")
    folder = pickles[0].removesuffix("data.pkl")
    kept: dict[str, memoryview] = {}

    def part(name: str) -> bytes:
        try:
            return archive.read(name)
        except (KeyError, zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
            raise AuditError(f"the file of torch.save is damaged: {name} cannot be read ({error})") from error

    def storage(key: Any) -> Storage:
        kind = getattr(key[1], "name", "") if isinstance(key, tuple) and len(key) >= 3 else ""
        dtype = _TORCH_TYPES.get(kind.rpartition(".")[2].removesuffix("Storage"))
        if dtype is None:
            raise AuditError(f"tensors of {kind or 'an unknown storage'} are not read")
        name = f"{folder}data/{key[2]}"
        if name not in kept:
            kept[name] = memoryview(part(name))
        return Storage(kept[name], dtype)

    order = f"{folder}byteorder"
    if order in names and part(order) != b"little":
        raise AuditError("the tensors were written on a big-endian machine; they are not read")
    return plain(read_pickle(part(pickles[0]), storage))


def plain(value: Any) -> Any:
    """Replace inert records of arrays, tensors, dicts and enumerations by NumPy arrays and plain values; others stay.

    Raises:
        AuditError: An array does not match its bytes, or the value exceeds a limit.
    """
    return _converted(value, 0, {})


def _converted(value: Any, depth: int, done: dict[int, Any]) -> Any:
    """`plain` at a depth. An object that the file refers to several times is converted once and kept in `done`, so no
    file grows in memory."""
    if not isinstance(value, list | tuple | dict | Inert):
        return value
    if depth > MAX_DEPTH:
        raise AuditError(f"values are nested more than {MAX_DEPTH} deep")
    if id(value) not in done:
        if isinstance(value, dict):
            plain_value: Any = {key: _converted(item, depth + 1, done) for key, item in value.items()}
        elif isinstance(value, Inert):
            plain_value = _record(value, depth, done)
        else:
            plain_value = [_converted(item, depth + 1, done) for item in value]
        done[id(value)] = plain_value
    return done[id(value)]


def _record(value: Inert, depth: int, done: dict[int, Any]) -> Any:
    """What a record of an array, a container or a member of an enumeration stands for, by its last name."""
    try:
        match value.name.rpartition(".")[2]:
            case "_reconstruct":
                return _array(value, depth, done)
            case "scalar":
                return np.frombuffer(value.args[1], _numpy_type(value.args[0]))[0].item()
            case "_rebuild_tensor" | "_rebuild_tensor_v2":
                storage, offset, size, stride, *_ = value.args
                if not isinstance(storage, Storage):
                    raise AuditError("a tensor of the pickle has no storage")
                return storage.view(offset, tuple(size), tuple(stride))
            case "_rebuild_tensordict_files_consolidated":  # a dict of arrays in one buffer
                raw = memoryview(_converted(value.args[1], depth + 1, done).tobytes())
                return {
                    key: array_of(raw[start : stop - padding], dtype, tuple(shape))
                    for key, (dtype, shape, start, stop, padding) in value.args[0]["leaves"].items()
                }
            case "OrderedDict" | "defaultdict":
                return _converted(value.pairs, depth, done)
            case "Size":
                return [int(item) for item in value.args[0]]
    except (IndexError, TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise AuditError(f"a `{value.name}` of the pickle is damaged ({error})") from error
    if value.state is None and len(value.args) == 1 and isinstance(value.args[0], str | int):
        return value.args[0]  # a member of an enumeration
    return value


def _array(value: Inert, depth: int, done: dict[int, Any]) -> Any:
    """`numpy._reconstruct`: an array; a list where its elements are objects."""
    _, shape, dtype, fortran, data = value.state
    if isinstance(data, list):
        if prod(shape) != len(data):
            raise AuditError(f"an array of objects of shape {shape} has {len(data)} elements")
        return _converted(data, depth, done)
    found = np.frombuffer(data, _numpy_type(dtype))
    if prod(shape) != len(found):
        raise AuditError(f"an array of shape {shape} has {len(found)} elements")
    return found.reshape(shape, order="F" if fortran else "C")


def _numpy_type(value: Any) -> np.dtype[Any]:
    """The type of an inert `numpy.dtype`.

    Raises:
        AuditError: It is not a type of numbers or texts.
    """
    text = value.args[0] if isinstance(value, Inert) and value.args else ""
    match = _NUMPY_TYPE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise AuditError(f"arrays of type {text!r} are not read")
    order = value.state[1] if isinstance(value.state, tuple) else "<"
    return np.dtype(text).newbyteorder(">" if order == ">" else "<")
