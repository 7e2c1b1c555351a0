"""A study's file."""

import tomllib
from pathlib import Path

from natgrad_lab.errors import UserError
from natgrad_lab.schema import SchemaError, build
from natgrad_lab.study.spec import StudySpec


def read_study(path: Path) -> StudySpec:
    """The study that a file describes. Errors name the file and all that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    try:
        return build(StudySpec, tomllib.loads(text))
    except (tomllib.TOMLDecodeError, SchemaError) as error:
        raise UserError(f"{path}: {error}") from error
