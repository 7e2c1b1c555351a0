"""The pages of the documentation, cut into their blocks and code spans."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.M | re.S)


def relative(path: Path) -> str:
    """A path as a test's name."""
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[str]:
    """The text of a page's fenced blocks in some languages."""
    found = FENCE.findall(path.read_text())
    return [text for language, text in found if language.strip() in languages]


def prose(path: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", path.read_text())


def spans(path: Path) -> Iterator[str]:
    """Code inside of sentences, on one line each."""
    for span in re.findall(r"`([^`]+)`", prose(path)):
        yield " ".join(span.split())
