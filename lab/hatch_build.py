"""The lab has the library's version and needs the library of that version."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SameVersion(MetadataHookInterface):
    """Reads ``__version__`` of the library beside it.

    A source distribution stands alone: its version is known from its own metadata.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        library = Path(self.root).parent / "src" / "natgrad" / "__init__.py"
        if not library.is_file():
            return
        found = re.search(r'^__version__ = "(.+)"$', library.read_text(), re.M)
        if found is None:
            raise ValueError(f"{library} has no line __version__ = ...")
        metadata["version"] = found[1]
        needs: list[str] = self.config["dependencies"]
        metadata["dependencies"] = [f"natgrad=={found[1]}", *needs]
