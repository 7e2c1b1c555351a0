"""TOML into dataclasses, exactly: an unknown key or a wrong type is an error.

Errors name the place in the file, the value, and what is legal there.
"""

import dataclasses
import tomllib
import types
import typing
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from natgrad_lab.errors import UserError
from natgrad_lab.study.spec import Grid, StudySpec

Table = dict[str, Any]


def read_study(path: Path) -> StudySpec:
    """A study's file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    try:
        return build(StudySpec, tomllib.loads(text), "")
    except (tomllib.TOMLDecodeError, UserError) as error:
        raise UserError(f"{path}: {error}") from error


def build(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``: a dataclass, tuple, dict, Literal, union or plain type."""
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union(arguments, value, where)
    if origin is typing.Literal:
        return _literal(arguments, value, where)
    if origin is tuple:
        _expect(isinstance(value, list), where, value, "a list")
        items = enumerate(value)
        return tuple(build(arguments[0], item, f"{where}[{i}]") for i, item in items)
    if origin is dict:
        _expect(isinstance(value, dict), where, value, "a table")
        names = value.items()
        return {k: build(arguments[1], v, _join(where, k)) for k, v in names}
    return _scalar(kind, value, where)


def override(config: Any, settings: Table, where: str) -> Any:
    """A config with some of its settings replaced, checked as in a file."""
    hints = typing.get_type_hints(type(config))
    _known(settings, hints, where)
    changed: Table = {}
    for name, value in settings.items():
        old = getattr(config, name)
        if dataclasses.is_dataclass(old):
            _expect(isinstance(value, dict), _join(where, name), value, "a table")
            changed[name] = override(old, value, _join(where, name))
        else:
            changed[name] = build(hints[name], value, _join(where, name))
    return _checked(where, lambda: dataclasses.replace(config, **changed))


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if kind is Grid and isinstance(value, list):
        value = {"values": value}
    _expect(isinstance(value, dict), where, value, "a table")
    hints = typing.get_type_hints(kind)
    _known(value, hints, where)
    _complete(kind, value, where)
    parts = {k: build(hints[k], item, _join(where, k)) for k, item in value.items()}
    return _checked(where, lambda: kind(**parts))


def _checked(where: str, make: Any) -> Any:
    try:
        return make()
    except ValueError as error:
        raise UserError(f"{where}: {error}" if where else str(error)) from error


def _known(value: Table, legal: Any, where: str) -> None:
    for name in value:
        if name in legal:
            continue
        near = get_close_matches(name, legal, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        place = f"[{where}]" if where else "the top level"
        names = ", ".join(legal)
        raise UserError(f"Unknown key {name!r} in {place}.{hint} Legal keys: {names}.")


def _complete(kind: Any, value: Table, where: str) -> None:
    for each in dataclasses.fields(kind):
        free = each.default is dataclasses.MISSING
        if free and each.default_factory is dataclasses.MISSING:
            message = f"Missing key {_join(where, each.name)!r}."
            _expect_message(each.name in value, message)


def _union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None:
        _expect(types.NoneType in options, where, value, "a value")
        return None
    chosen = next(each for each in options if each is not types.NoneType)
    # TOML has no null: the word none switches an optional setting off
    if value == "none" and types.NoneType in options and chosen is not str:
        return None
    return build(chosen, value, where)


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
    names = {bool: "true or false", str: "a string"}
    _expect(isinstance(value, kind), where, value, names.get(kind, str(kind)))
    return value


def _expect(ok: bool, where: str, value: Any, legal: str) -> None:
    _expect_message(ok, f"Invalid {where} = {value!r}. Must be {legal}.")


def _expect_message(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
