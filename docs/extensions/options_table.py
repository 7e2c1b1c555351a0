"""Writes ``docs/reference/options.md`` from the declaration in `natgrad.Options`.

python docs/extensions/options_table.py
"""

import re
from dataclasses import fields
from inspect import getdoc
from pathlib import Path

import natgrad

PAGE = Path(__file__).parents[1] / "reference" / "options.md"
CLASSES = (natgrad.KFAC, natgrad.SPNGD, natgrad.Polar)
HEAD = """# Options

After this page you know every option, its default in each class and what it means.

Written by `python docs/extensions/options_table.py` from the text of `natgrad.Options`.
Constructors take some of these as arguments of their own; all of them are fields of
`options`, as in `options=dataclasses.replace(natgrad.KFAC.defaults, fisher="sampled")`.
KFAC leaves lr, momentum, weight_decay, average and decay to its host optimizer.

| option | KFAC | SPNGD | Polar | what it is |
|---|---|---|---|---|
"""


def texts() -> dict[str, str]:
    """What each option is, from the docstring of `natgrad.Options`."""
    attributes = (getdoc(natgrad.Options) or "").partition("Attributes:\n")[2]
    entries = re.split(r"\n(?=    \w+: )", attributes)
    pairs = (entry.strip().partition(": ") for entry in entries)
    return {name: " ".join(text.split()) for name, _, text in pairs}


def cell(value: object) -> str:
    """A value as code; a part is its class with what is not its default."""
    if not hasattr(value, "__dataclass_fields__"):
        return f"`{value!r}`"
    kind = type(value)
    usual = kind()
    pairs = ((f.name, getattr(value, f.name)) for f in fields(value))  # pyright: ignore[reportArgumentType]
    own = (f"{n}={cell(x).strip('`')}" for n, x in pairs if x != getattr(usual, n))
    return f"`{kind.__name__}({', '.join(own)})`"


def page() -> str:
    """The whole page."""
    meaning = texts()
    rows = [
        f"| `{f.name}` | "
        + " | ".join(cell(getattr(kind.defaults, f.name)) for kind in CLASSES)
        + f" | {meaning[f.name].replace('``', '`')} |"
        for f in fields(natgrad.Options)
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
