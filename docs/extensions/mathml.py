"""Formulas as MathML, which browsers draw themselves: pages need no network.

The converter is docutils' own. A formula that it cannot read is a warning.
"""

import html
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Offer the renderer to Sphinx."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def inline(translator: Any, node: nodes.math) -> None:
    """A formula in a sentence."""
    translator.body.append(converted(node, as_block=False))
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    """A formula on lines of its own."""
    attributes = {"CLASS": "math notranslate nohighlight"}
    translator.body.append(translator.starttag(node, "div", **attributes))
    translator.body.append(converted(node, as_block=True))
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def converted(node: nodes.Element, *, as_block: bool) -> str:
    """A node's formula."""
    text = node.astext()
    try:
        return latex2mathml.tex2mathml(text, as_block=as_block)
    except MathError as error:
        LOGGER.warning("%s In the formula: %s", error, text, location=node)
        return f"<code>{html.escape(text)}</code>"
