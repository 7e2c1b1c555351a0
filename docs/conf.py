"""Sphinx settings: ``make docs`` builds the pages into ``docs/_build`` offline."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
OWN = Path(__file__).parent / "extensions"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "lab" / "src"), str(OWN)]

project = "natgrad"
author = "natgrad contributors"
project_copyright = author
_source = (ROOT / "src" / "natgrad" / "__init__.py").read_text()
(release,) = re.findall(r'^__version__ = "(.+)"$', _source, re.M)
version = release

extensions = [
    "myst_parser",
    "mathml",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"natgrad {release}"

html_static_path = ["_static"]
html_css_files = ["tables.css"]  # tables fit narrow screens
html_js_files = ["tables.js"]

html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

# `name` in a docstring is a Python object, linked where there is one.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
# A field that a rule explains would be there twice, with the text of its base class.
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Headings of tables that benchmarks write, and links to files outside of docs/, which a
# test follows.
suppress_warnings = ["myst.header", "myst.xref_missing"]
