"""Links that leave `docs/` lead to the repository: a hook of mkdocs.

A page links to files of the repository by relative paths, which work in a checkout and on the
repository's own pages. The site has no such files, so there the links become addresses under
`repo_url`. Paths of pages in docstrings (docs/how_to/resume.md) become links.
"""

import os
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
_PAGE = re.compile(r"\bdocs/(\w+/\w+\.md)\b")


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Replace the links of a page that leave the folder of the documentation."""
    folder = os.path.dirname(os.path.join("docs", page.file.src_uri))  # noqa: PTH118, PTH120

    def replaced(link: re.Match) -> str:
        path = os.path.normpath(os.path.join(folder, link[1]))  # noqa: PTH118
        if path.startswith("docs/"):
            return link[0]
        return f"]({config.repo_url}/blob/main/{path}{link[2] or ''})"

    return _LINK.sub(replaced, markdown)


def on_page_content(html: str, *, page: Page, files: Files, **_: Any) -> str:
    """Link the pages that docstrings name by their path."""
    if not page.file.src_uri.startswith("reference/"):
        return html

    def linked(name: re.Match) -> str:
        file = files.get_file_from_path(name[1])
        if file is None:
            return name[0]
        return f'<a href="{file.url_relative_to(page.file)}">{name[0]}</a>'

    return _PAGE.sub(linked, html)
