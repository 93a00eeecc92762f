"""Sphinx's settings for the API pages (``make docs``), which are made of the package's own docstrings."""

from __future__ import annotations

import hetspmd

project = "hetspmd"
version = release = hetspmd.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# A name in a docstring is a link, and a link that leads nowhere is a warning, which ends `make docs`. These names
# have no page here: other projects', and types that only the inside of the package makes.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|dist|os|collections\.abc)\..*"),
    (
        "py:class",
        r"(.*\.)?(Communicator|Curve|Graph|Lengths|Limits|Loss|ModelSteps|OpTimes|Placement|Program)",
    ),
    ("py:class", r"(.*\.)?(ShardedModule|Theory|_Sum)"),
    ("py:class", r"(.*\.)?(Compile|Hap|Tune|Verify|Worker)Keywords"),  # what the text beside them lists
]

html_theme = "alabaster"
html_theme_options = {"description": "What can be called, with units and errors", "page_width": "1100px"}
html_sidebars = {"**": ["about.html", "navigation.html", "searchbox.html"]}
html_show_sourcelink = html_copy_source = html_show_copyright = False
