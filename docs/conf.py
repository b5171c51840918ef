"""Sphinx configuration."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the extensions beside it

project = "zrpc"
author = "the zrpc developers"
project_copyright = f"%Y, {author}"
version = release = installed_version("torch-zrpc")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "llms_txt",
    "search_words",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"zrpc {version}"
html_logo = "_static/mark.svg"
html_favicon = "_static/mark.svg"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

# Copies the commands of a session, without prompts and output.
copybutton_prompt_text = "$ "

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# A name in single backticks in a docstring is a reference where there is such a name.
default_role = "py:obj"
autodoc_mock_imports = ["ray"]  # not installed everywhere
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

# What is documented elsewhere, which is not looked up: the docs build without a network.
nitpick_ignore_regex = [
    ("py:class", r"(?!zrpc\.).*"),
    # Type variables.
    ("py:class", r"zrpc\..*\._?[A-Z]"),
    # The types of decorators and of what they return.
    ("py:class", r"zrpc\.functions\._(Later|OfLists)"),
    # The futures of `Mesh.submit`.
    ("py:class", r"zrpc\.testing\.worker\.Work"),
    # The proxies of RRefs.
    ("py:class", r"zrpc\.services\.rref\.proxy\.Proxy"),
    # A future of concurrent.futures that can be awaited.
    ("py:class", r"zrpc\.testing\.worker\.MeshFuture"),
    ("py:exc", r"(?!zrpc\.).*"),
    # Internals, in the docstrings that explain the protocols.
    ("py:obj", r"References\.\w+"),
]
