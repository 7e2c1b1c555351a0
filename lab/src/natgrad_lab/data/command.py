"""`natgrad data`: download a data set; write a cache of its images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from natgrad_lab.data.follow import followed
from natgrad_lab.data.sources import SOURCES, get
from natgrad_lab.errors import UserError

USAGE = f"""usage: natgrad data get NAME [--root DIR]
       natgrad data cache imagenet --out DIR [--crop resized] [--check] ...

get downloads, checks and unpacks a data set: {", ".join(SOURCES)}.
The others but imagenet need none: text of your own is named by --data.folder.
cache resizes ImageNet's images once, for --data.cache DIR."""


@dataclass(frozen=True, kw_only=True)
class Get:
    """Download a data set, check it and unpack it; an interrupted one goes on."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """The data set: cifar10 or fashion_mnist."""
    root: Path | None = None
    """Folder of all data sets. None: $NATGRAD_DATA, or the user's cache."""


def main(arguments: Sequence[str]) -> int:
    """Parse, then download or write a cache."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "cache":
        from natgrad_lab.data import cache_command

        return cache_command.main(arguments[1:])
    if arguments[0] != "get":
        legal = "'data get' or 'data cache'"
        raise UserError(f"Unknown command 'data {arguments[0]}'. Must be {legal}.")
    asked = tyro.cli(Get, prog="natgrad data get", args=list(arguments[1:]))
    with followed("bytes") as progress:
        folder = get(asked.name, asked.root, progress)
    print(f"{asked.name} is in {folder}")
    return 0
