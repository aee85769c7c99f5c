"""How Sphinx builds the site: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import llms_text
import reference_pages
from sphinx.application import Sphinx

from storm_dagster import __version__

DOCS = Path(__file__).parent
project = "storm_dagster"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["generated"]
html_theme = "furo"
html_title = "storm_dagster"
# Whoever reads the site offline reads all of it: nothing is fetched from elsewhere.
html_theme_options = {"navigation_with_keys": True}
html_copy_source = html_show_sourcelink = False
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False
# Docstrings name things in the reader's words; not every such name has a page of its own.
nitpicky = False


def write_llms_text(app: Sphinx, error: Exception | None) -> None:
    """Write the list of pages beside them, with links of the site."""
    if error is None:
        text = llms_text.render(DOCS, of_site=True)
        (Path(app.outdir) / "llms.txt").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Write the reference pages before anything is read, and the list of pages at the end."""
    reference_pages.write_pages(DOCS / "reference")
    app.connect("build-finished", write_llms_text)
