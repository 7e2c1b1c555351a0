"""Parsed TOML or JSON as the types that are expected of it, exactly.

A dataclass takes its own keys and no others; a `TypedDict` needs its keys and may have
more. Errors name the place, the value and what is legal there, all of them at once.
A dataclass may have ``LIST``, the key that a bare list stands for, and a static method
``lacks``: the keys that a table needs beside those without a default.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from natgrad_lab.errors import UserError

Table = dict[str, Any]


class SchemaError(UserError):
    """What is not as it must be; ``problems`` has one sentence or more for each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        lines = "".join(f"\n  {each}" for each in problems)
        super().__init__(problems[0] if len(problems) == 1 else lines)


def build(kind: Any, value: Any, where: str = "") -> Any:
    """``value`` as ``kind``: a dataclass, tuple, dict, Literal, union or plain type.

    ``where`` is the place of the value, for errors.
    """
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if typing.is_typeddict(kind):
        return _typed_dict(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union(arguments, value, where)
    if origin is typing.Literal:
        return _literal(arguments, value, where)
    if origin in (tuple, list):
        _expect(isinstance(value, list), where, value, "a list")
        items = ((f"{where}[{i}]", item) for i, item in enumerate(value))
        return origin(_each((build, arguments[0], item, at) for at, item in items))
    if origin is dict:
        _expect(isinstance(value, dict), where, value, "a table")
        names = ((_join(where, k), item) for k, item in value.items())
        found = _each((build, arguments[1], item, at) for at, item in names)
        return dict(zip(value, found, strict=True))
    return _scalar(kind, value, where)


def override(config: Any, settings: Table, where: str) -> Any:
    """A config with some of its settings replaced, checked as in a file."""
    hints = typing.get_type_hints(type(config))
    _raise(_unknown(settings, hints, where))
    names = list(settings)
    calls = (
        (_overridden, hints, config, name, settings[name], where) for name in names
    )
    changed: Table = dict(zip(names, _each(calls), strict=True))
    return _checked(where, lambda: dataclasses.replace(config, **changed))


def _overridden(hints: Table, config: Any, name: str, value: Any, where: str) -> Any:
    old, place = getattr(config, name), _join(where, name)
    if not dataclasses.is_dataclass(old):
        return build(hints[name], value, place)
    _expect(isinstance(value, dict), place, value, "a table")
    return override(old, value, place)


def _each(calls: Iterable[tuple[Any, ...]], problems: Sequence[str] = ()) -> list[Any]:
    """What calls return; if there are problems, those of all calls are raised."""
    found: list[Any] = []
    problems = list(problems)
    for function, *arguments in calls:
        try:
            found.append(function(*arguments))
        except SchemaError as error:
            problems += error.problems
    _raise(problems)
    return found


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    given: Any = value
    if isinstance(value, list) and hasattr(kind, "LIST"):
        given = {kind.LIST: value}
    _expect(isinstance(given, dict), where, value, "a table")
    hints = typing.get_type_hints(kind)
    problems = _unknown(given, hints, where) + _missing(kind, given, where)
    known = {name: item for name, item in given.items() if name in hints}
    parts = _parts(hints, known, where, problems)
    return _checked(where, lambda: kind(**parts))


def _typed_dict(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, value, "a table")
    hints = typing.get_type_hints(kind)
    absent = [name for name in hints if name in kind.__required_keys__ - value.keys()]
    problems = [_lacks(_join(where, name)) for name in absent]
    known = {name: item for name, item in value.items() if name in hints}
    return {**value, **_parts(hints, known, where, problems)}


def _parts(hints: Table, known: Table, where: str, problems: list[str]) -> Table:
    calls = ((build, hints[k], item, _join(where, k)) for k, item in known.items())
    return dict(zip(known, _each(calls, problems), strict=True))


def _checked(where: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise SchemaError(f"{where}: {error}" if where else str(error)) from error


def _unknown(value: Table, legal: Any, where: str) -> list[str]:
    problems: list[str] = []
    for name in value:
        if name in legal:
            continue
        near = get_close_matches(name, legal, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        place = f"[{where}]" if where else "the top level"
        names = ", ".join(legal)
        problems.append(f"Unknown key {name!r} in {place}.{hint} Legal keys: {names}.")
    return problems


def _missing(kind: Any, value: Table, where: str) -> list[str]:
    """Keys without a default, and what a dataclass itself says that a table lacks."""
    absent = [
        each.name
        for each in dataclasses.fields(kind)
        if each.default is dataclasses.MISSING
        and each.default_factory is dataclasses.MISSING
        and each.name not in value
    ]
    more = kind.lacks(value) if hasattr(kind, "lacks") else ()
    return [_lacks(_join(where, name)) for name in (*absent, *more)]


def _lacks(place: str) -> str:
    return f"Missing key {place!r}."


def _union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None:
        _expect(types.NoneType in options, where, value, "a value")
        return None
    chosen = [each for each in options if each is not types.NoneType]
    # TOML has no null: the word none switches an optional setting off
    if value == "none" and types.NoneType in options and str not in chosen:
        return None
    words = [each for each in chosen if typing.get_origin(each) is typing.Literal]
    for each in words:  # a number, or a word instead of one
        if value in typing.get_args(each):
            return value
    return build(chosen[0], value, where)


def _literal(options: tuple[Any, ...], value: Any, where: str) -> Any:
    legal = "one of " + ", ".join(map(str, options))
    _expect(value in options, where, value, legal)
    return value


def _scalar(kind: Any, value: Any, where: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        _expect(number, where, value, "a number")
        return float(value)
    if kind is int:
        _expect(number and isinstance(value, int), where, value, "a whole number")
        return value
    if kind is Path:
        _expect(isinstance(value, str), where, value, "a path")
        return Path(str(value))
    names = {bool: "true or false", str: "a string", dict: "a table"}
    _expect(isinstance(value, kind), where, value, names.get(kind, str(kind)))
    return value


def _expect(ok: bool, where: str, value: Any, legal: str) -> None:
    if not ok:
        raise SchemaError(f"Invalid {where} = {_short(value)}. Must be {legal}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _raise(problems: list[str]) -> None:
    if problems:
        raise SchemaError(*problems)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
