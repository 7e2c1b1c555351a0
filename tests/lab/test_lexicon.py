"""Words that readers stumble over are not in the pages, docstrings and messages.

The field has plain words for all of them. A word in code, in a code span or in a
comment is not looked at.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.pages import DOCS, PAGES, ROOT, prose, relative

COUNTED = "one|number|block|lambda|weight|elements|examples|images|item|label"
PER = (
    "layer|factor|image|row|worker|bucket|rank|node|example|tensor|forward|matrix|step"
)
RIDDLES = {
    "anew": "again, from the start",
    "alike": "equally, the same",
    "are dear": "are expensive",
    "is dear": "is expensive",
    "falls? silent": "stops sending, is never called",
    "for ever": "forever, without end",
    "nobody's": "of no rank, of no particular machine",
    "eats": "reads, takes",
    "as ever": "as with any optimizer",
    "no merit of": "not specific to",
    "to be beaten": "the baselines",
    "of now": "present, current",
    "stands? still": "hangs, does not change",
    "stood still": "hung, did not change",
    "rides with": "travels with, is part of",
    "hitherto": "so far",
    "henceforth": "from then on",
    "thereof": "of it",
    "wherein": "in which",
    "whither": "where",
    "betwixt": "between",
    "nought": "zero",
    "as in the papers": "what was run",
    "the papers' settings": "what was run",
    "(?:is|are) no matri(?:x|ces)": "is not a matrix",
    "(?:by|keeps?) (?:its|their) own books": "by its own count",
    "own business": "private, may change",
    # "one a layer", "a number a row"
    rf"(?:{COUNTED}) an? (?:{PER})": "one per layer",
}
"""A pattern, and what to say instead."""

FOUND = re.compile(rf"\b({'|'.join(RIDDLES)})\b", re.I)
TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
SOURCES = sorted(
    path
    for folder in ("src/natgrad", "lab/src/natgrad_lab", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
AFTER = re.compile(r"After this page you (can|know) ")


def riddles(text: str) -> list[str]:
    """What a text says that it should not, spans of code left out."""
    plain = " ".join(re.sub(r"`[^`]*`", "", text).split())
    return [match[1] for match in FOUND.finditer(plain)]


def sentences(path: Path) -> Iterator[str]:
    """Docstrings, messages and other strings of a file that have several words."""
    for node in ast.walk(ast.parse(path.read_text())):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and " " in text:
            yield text


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_a_page_has_no_riddles(path: Path) -> None:
    assert riddles(prose(path)) == []


@pytest.mark.parametrize("folder", ["src/natgrad", "lab/src/natgrad_lab", "examples"])
def test_docstrings_and_messages_have_no_riddles(folder: str) -> None:
    found = {
        f"{relative(path)}: {word} (say: {RIDDLES.get(word.lower(), 'otherwise')})"
        for path in SOURCES
        if path.is_relative_to(ROOT / folder)
        for text in sentences(path)
        for word in riddles(text)
    }
    assert found == set()


def test_riddles_are_found() -> None:
    assert riddles("Wide layers are dear, and all fall\nsilent.") == [
        "are dear",
        "fall silent",
    ]
    assert riddles("It has one owner, and one a layer.") == ["one a layer"]
    assert riddles("`anew` is a name; nothing else is renewed.") == []
    assert len(SOURCES) > 150


@pytest.mark.parametrize(
    "path", [p for p in PAGES if p.is_relative_to(DOCS) and p.name != "index.md"],
    ids=relative,
)  # fmt: skip
def test_the_first_sentence_says_what_the_reader_can_do_after_the_page(
    path: Path,
) -> None:
    _, _, body = path.read_text().partition("\n\n")
    assert AFTER.match(body), body[:80]
