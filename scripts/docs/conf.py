"""The settings of Sphinx. `stage.py` writes the pages, `scripts/docs.sh` calls both."""

import shardformer

project = "shardformer"
author = "the shardformer developers"
release = version = shardformer.__version__
copyright = f"{author}; MIT license"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["files"]
nitpick_ignore_regex = [("py:.*", ".*")]  # types of JAX and NumPy have no page here
suppress_warnings = ["misc.highlighting_failure"]  # listings with `...` and placeholders are no complete programs
smartquotes = False  # would change the quotes of commands

myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 4

default_role = "literal"  # docstrings have code in single backticks
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_custom_sections = [("Arguments", "params_style")]

html_theme = "furo"
html_title = f"shardformer {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
