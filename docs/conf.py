"""The documentation site: `python -m sphinx -W -c docs . build/site`.

The sources are the Markdown files as they lie in the repository, README.md among them, so that
every link also works where files are shown without this site. Links to source files become
downloads. docs/index.md is the front page; the table of contents is made of its links.
"""

import re
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx

project = "fused_op"
author = "the fused_op authors"
copyright = f"2026, {author}"
release = version = version_of("fused_op")

root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/*.md", "examples/**.md"]
exclude_patterns = [".*", "build", "examples/templates/op"]  # the last: a page of the copy

myst_heading_anchors = 3  # as GitHub makes them: [tests](CONTRIBUTING.md#test)
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"fused_op {version}"
html_copy_source = False
html_additional_pages = {"index": "to_front_page.html"}
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]

ROOT = Path(__file__).resolve().parent.parent


def adapt(app: Sphinx, page: str, source: list[str]) -> None:
    """Do what Markdown alone, as it is shown elsewhere, does without."""
    folder = (ROOT / page).parent

    def link(match: re.Match[str]) -> str:
        """A folder as its README, or, where it has none, as plain text."""
        text, target = match.groups()
        if not (folder / target).is_dir():
            return match[0]
        readme = (folder / target / "README").resolve().relative_to(ROOT)
        return f"[{text}]({target}/README.md)" if str(readme) in app.env.found_docs else text

    source[0] = re.sub(r"\[([^]]+)\]\((?!http|#)([^)#]+)\)", link, source[0])
    if page == root_doc:
        source[0] += "".join(contents(source[0]))


def contents(front_page: str) -> Iterator[str]:
    """A table of contents of the front page's links, a part for each heading."""
    for title, text in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", front_page, re.M):
        links = re.findall(r"^- \[(.*?)\]\(([^)#]+)\.md\)", text, re.M)
        pages = "\n".join(f"{name} <{page}>" for name, page in links)
        yield f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", adapt)
