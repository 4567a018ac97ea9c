"""What rules ask of an entry point, whether it was imported or read as text: how it is called, and which methods it
has.

`ImportedCode` asks the object, `ReadCode` its syntax tree. `None` and `unknown` mean that the text leaves it open: then
a rule finds nothing, and counts as skipped.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.spec.code.signature import read_docstring, shape_of
from engine.validate.code.annotations import heads, scope_of
from engine.validate.code.source import (
    FUNCTION_EVENTS,
    Definition,
    Sources,
    class_attribute,
    declared_events,
    has_yield,
    is_function_environment,
    last_name,
    lineage,
    member,
)

Kind = Literal["class", "function", "value", "unknown"]
Missing = Literal["missing", "unknown"]


@dataclass(frozen=True)
class Method:
    """A method of a class, as its objects have it."""

    signature: inspect.Signature | None
    """Without `self`; None if it is not known."""
    definition: Definition | None = None
    """Its text, if it was read."""


@dataclass(frozen=True)
class ToolFacts:
    """What a tool tells the model."""

    name: str
    description: str
    untyped: Sequence[str]
    """Parameters of any type."""
    parameters: Sequence[str]
    documented: Sequence[str]
    """Parameters that the docstring describes."""


class ImportedCode:
    """An object that was imported.

    Args:
        thing: The object.
        text: Its text, if it can be read: it shows methods that a constructor sets.
    """

    def __init__(self, thing: Any, text: ReadCode | None = None) -> None:
        self._thing = thing
        self._text = text
        self.kind: Kind = "class" if inspect.isclass(thing) else "function" if callable(thing) else "value"
        name = type(thing).__name__
        self.what = f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"

    @property
    def signature(self) -> inspect.Signature | None:
        """How it is called; None if that is not known."""
        return _signature(self._thing)

    def method(self, name: str) -> Method | Missing:
        """A method of a class."""
        value = getattr(self._thing, name, None) if name != "__call__" or "__call__" in dir(self._thing) else None
        if not callable(value):
            computed = isinstance(inspect.getattr_static(self._thing, name, None), property)
            set_ = self._text is not None and self._text.method(name) == "unknown"
            return "unknown" if hasattr(self._thing, "__getattr__") or computed or set_ else "missing"
        signature = _signature(value)
        if signature is None or isinstance(inspect.getattr_static(self._thing, name), staticmethod | classmethod):
            return Method(signature)
        parameters = list(signature.parameters.values())
        if parameters and parameters[0].kind in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
            del parameters[0]
        return Method(signature.replace(parameters=parameters))

    def tool_problem(self, name: str | None) -> str | None:
        """Why a function, or the objects of a class, cannot be a tool; None if they can, or if that is not known."""
        target = inspect.getattr_static(self._thing, "__call__", None) if self.kind == "class" else self._thing
        if self.kind == "class" and not inspect.isfunction(target):
            return None
        try:
            shape_of(target, name or getattr(self._thing, "__name__", None))
        except (TypeError, NameError, AttributeError, ValueError) as error:
            return str(error)
        return None

    def tool(self, name: str | None) -> ToolFacts | None:
        """What it tells the model as a tool; None if it is no tool, or if that is not known."""
        from pydantic import PydanticUserError
        from pydantic.errors import PydanticSchemaGenerationError

        target = self._thing
        if inspect.isclass(target):
            target = inspect.getattr_static(target, "__call__", None)
        if not callable(target) or (inspect.isclass(self._thing) and not inspect.isfunction(target)):
            return None
        try:
            shape = shape_of(target, name or str(getattr(self._thing, "__name__", type(self._thing).__name__)))
        except (TypeError, NameError, AttributeError, ValueError, PydanticUserError, PydanticSchemaGenerationError):
            return None  # `code.protocol` reports it
        function = shape.schema["function"]
        schemas = function["parameters"].get("properties", {})
        untyped = [item for item, schema in schemas.items() if not set(schema) - {"description", "default"}]
        documented = list(read_docstring(getattr(target, "__doc__", None) or "")[1])
        return ToolFacts(shape.name, function["description"], untyped, [*schemas, shape.view or ""], documented)

    def events(self) -> Sequence[str] | Missing:
        """The events that it declares."""
        events = getattr(self._thing, "events", None)
        if isinstance(events, list | tuple) and events and all(isinstance(event, str) for event in events):
            return tuple(events)
        return "missing"

    def attribute(self, name: str) -> Any:
        """The value of a class attribute; None if it has none, or if that is not known."""
        return getattr(self._thing, name, None)

    @property
    def awaited(self) -> bool | None:
        """Whether a call gives a coroutine; None if that is not known."""
        called = getattr(self._thing, "__call__", None)  # noqa: B004  (an object's own)
        return inspect.iscoroutinefunction(self._thing) or inspect.iscoroutinefunction(called)


class ReadCode:
    """A class or function whose text was read.

    Args:
        definition: It.
        sources: Reads the modules of its bases and annotations.
    """

    what = ""

    def __init__(self, definition: Definition, sources: Sources) -> None:
        self.definition = definition
        self.sources = sources
        self._node = definition.node
        self.kind: Kind = "unknown"
        if isinstance(self._node, ast.ClassDef):
            self.kind = "class"
        elif all(last_name(item) == "action" for item in self._node.decorator_list):
            self.kind = "function"

    @property
    def constructor(self) -> Definition | None:
        """The function whose parameters `with` gives: itself, or the class's `__init__`, if that is certain."""
        if self.kind == "function":
            return self.definition
        return self._init if isinstance(self._init, Definition) else None

    @property
    def _init(self) -> Definition | Missing:
        if not isinstance(self._node, ast.ClassDef):
            return "unknown"
        decorators = [item for base in self._bases for item in base.node.decorator_list]
        if any(last_name(item) == "dataclass" for item in decorators):
            return "unknown"
        if member(self.definition, "__new__", self.sources) != "missing":
            return "unknown"
        return member(self.definition, "__init__", self.sources)

    @property
    def _bases(self) -> Sequence[Definition]:
        """A class, then its bases."""
        return lineage(self.definition, self.sources)[0]

    @property
    def signature(self) -> inspect.Signature | None:
        """How it is called; None if that is not known."""
        if self.kind == "function":
            return read_signature(self.definition)
        init = self._init
        if init == "missing":
            return inspect.Signature()
        return (
            None if not isinstance(init, Definition) or init.node.decorator_list else read_signature(init, bound=True)
        )

    def method(self, name: str) -> Method | Missing:
        """A method of a class."""
        if self.kind != "class":
            return "unknown"
        definition = member(self.definition, name, self.sources)
        if not isinstance(definition, Definition):
            open_ = definition == "missing" and member(self.definition, "__getattr__", self.sources) != "missing"
            return "unknown" if open_ else definition
        names = {last_name(item) for item in definition.node.decorator_list}
        if names & {"property", "cached_property"}:
            return "unknown"
        if names - {"staticmethod", "classmethod", "abstractmethod", "override"}:
            return Method(None)  # a decorator may change anything
        return Method(read_signature(definition, bound="staticmethod" not in names), definition)

    def tool_problem(self, name: str | None) -> str | None:
        """Why a function, or the objects of a class, cannot be a tool; None if they can, or if that is not known."""
        target = self._tool_function()
        return None if target is None else _tool_problem(target, name or self._node.name)

    def _tool_function(self) -> Definition | None:
        """The function that is called as a tool, if it is certain."""
        if self.kind == "class":
            call = self.method("__call__")
            return call.definition if isinstance(call, Method) else None
        return self.definition if self.kind == "function" else None

    def tool(self, name: str | None) -> ToolFacts | None:
        """What it tells the model as a tool; None if it is no tool, or if that is not known."""
        target = self._tool_function()
        if target is None or isinstance(target.node, ast.ClassDef) or _tool_problem(target, ""):
            return None
        scope = scope_of(target, self.sources)
        typed = {
            item.arg: heads(item.annotation, scope) for item in _named_parameters(target) if item.annotation is not None
        }
        untyped = [
            key for key, found in typed.items() if found and all(head.name in ("Any", "object") for head in found)
        ]
        shown = [key for key, found in typed.items() if not (found and found[0].name.endswith(".EpisodeView"))]
        description, words = read_docstring(ast.get_docstring(target.node) or "")
        return ToolFacts(
            name or self._node.name, description, [key for key in untyped if key in shown], list(typed), list(words)
        )

    def events(self) -> Sequence[str] | Missing:
        """The events that it declares."""
        if self.kind != "class":
            return declared_events(self._node) or ("unknown" if self._node.decorator_list else "missing")
        for item in self._bases:
            if isinstance(item.node, ast.ClassDef) and class_attribute(item.node, "events") is not None:
                return declared_events(item.node) or "unknown"
        return "missing" if member(self.definition, "events", self.sources) == "missing" else "unknown"

    def attribute(self, name: str) -> Any:
        """The value of a class attribute; None if it has none, or if that is not known."""
        for item in self._bases if self.kind == "class" else ():
            value = class_attribute(item.node, name) if isinstance(item.node, ast.ClassDef) else None
            if value is not None:
                try:
                    return ast.literal_eval(value)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    return None
        return None

    @property
    def awaited(self) -> bool | None:
        """Whether a call gives a coroutine; None if that is not known."""
        if self.kind != "function" or self._node.decorator_list:
            return None
        return isinstance(self._node, ast.AsyncFunctionDef)


CodeFacts = ImportedCode | ReadCode
"""What an entry point names, imported or read."""


_GIVEN = frozenset({"task", "seed", "view"})
"""Parameters that the engine gives."""


class ReadFunctionEnvironment(ReadCode):
    """A function with `@environment` whose text was read."""

    def __init__(self, definition: Definition, sources: Sources) -> None:
        super().__init__(definition, sources)
        self.kind = "class"

    @property
    def constructor(self) -> Definition | None:
        """The function: `with` gives its parameters."""
        return self.definition

    @property
    def signature(self) -> inspect.Signature | None:
        """Its parameters without those that the engine gives."""
        return inspect.Signature(
            [
                item if item.kind is item.VAR_KEYWORD else item.replace(kind=item.KEYWORD_ONLY)
                for item in read_signature(self.definition).parameters.values()
                if item.name not in _GIVEN and item.kind is not item.VAR_POSITIONAL
            ]
        )

    def method(self, name: str) -> Method | Missing:
        """A method of a class."""
        call = self.definition.node.decorator_list[0]
        named = {item.arg for item in call.keywords} if isinstance(call, ast.Call) else set()
        if name in ("reset", "step") or (name == "tools" and "tools" in named):
            return Method(None)
        return "missing" if name in ("score", "tools") else "unknown"

    def events(self) -> Sequence[str] | Missing:
        """The events that it declares."""
        return FUNCTION_EVENTS

    def attribute(self, name: str) -> Any:
        """The value of a class attribute; None if it has none, or if that is not known."""
        node = self.definition.node
        return has_yield(node) if name == "keeps_state" and not isinstance(node, ast.ClassDef) else None


def read_code(definition: Definition, sources: Sources) -> ReadCode:
    """Return what rules ask of a definition."""
    if is_function_environment(definition.node) and _is_ours(definition):
        return ReadFunctionEnvironment(definition, sources)
    return ReadCode(definition, sources)


def _is_ours(definition: Definition) -> bool:
    """Whether its decorator comes from `engine.environments`; others may have the same name."""
    mark: ast.expr = definition.node.decorator_list[0]
    while not isinstance(mark, ast.Name):
        inner = mark.func if isinstance(mark, ast.Call) else getattr(mark, "value", None)
        if not isinstance(inner, ast.expr):
            return False
        mark = inner
    for item in definition.module.bindings.get(mark.id, ()):
        names = [alias.name for alias in item.names] if isinstance(item, ast.Import) else []
        names += [item.module or ""] if isinstance(item, ast.ImportFrom) else []
        if any(name.startswith("engine.environments") for name in names):
            return True
    return False


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError, NameError):  # a msgspec struct's hints may name what only type checkers import
        return None


def _named_parameters(function: Definition) -> list[ast.arg]:
    """The parameters of a function or method that can be given by name, without `self`."""
    assert not isinstance(function.node, ast.ClassDef)
    given = function.node.args
    listed = [*given.args, *given.kwonlyargs]
    is_static = any(last_name(item) == "staticmethod" for item in function.node.decorator_list)
    return listed[1:] if function.owner is not None and not is_static and given.args else listed


def _tool_problem(function: Definition, name: str) -> str | None:
    """What `shape_of` would refuse, in its words."""
    assert not isinstance(function.node, ast.ClassDef)
    given = function.node.args
    for item in (*given.posonlyargs[function.owner is not None :], given.vararg, given.kwarg):
        if item is not None:
            return f"tool `{name}`: parameter `{item.arg}` must be one that can be given by name"
    for item in _named_parameters(function):
        if item.annotation is None and not (item.arg == "self" and function.owner is None):
            return f"tool `{name}`: give parameter `{item.arg}` a type; the model is shown it"
    return None


def read_signature(function: Definition, *, bound: bool = False) -> inspect.Signature:
    """The signature of a function, with the text of annotations and defaults; `bound`: without its first parameter."""
    assert not isinstance(function.node, ast.ClassDef)
    given = function.node.args
    parameter = inspect.Parameter
    first = [*given.posonlyargs, *given.args]
    defaults: list[Any] = [parameter.empty] * (len(first) - len(given.defaults)) + list(given.defaults)
    found = [
        parameter(
            item.arg,
            parameter.POSITIONAL_ONLY if at < len(given.posonlyargs) else parameter.POSITIONAL_OR_KEYWORD,
            default=default,
            annotation=item.annotation,
        )
        for at, (item, default) in enumerate(zip(first, defaults, strict=True))
    ][bound:]
    if given.vararg:
        found.append(parameter(given.vararg.arg, parameter.VAR_POSITIONAL))
    for item, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(
            parameter(
                item.arg,
                parameter.KEYWORD_ONLY,
                default=parameter.empty if default is None else default,
                annotation=item.annotation,
            )
        )
    if given.kwarg:
        found.append(parameter(given.kwarg.arg, parameter.VAR_KEYWORD))
    return inspect.Signature(found)
