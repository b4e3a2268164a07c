"""Docstrings as Markdown: an extension of griffe, which reads them for the site.

Google's style has the examples under `Examples:`. Ours follow the sentence that they show, and
Markdown would take their `>>>` for quotations. Pages that a docstring names by their path, such as
docs/how_to/resume.md, become links with the page's title.
"""

import re
from pathlib import Path
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Puts a fence around each paragraph that begins with `>>>`, and links the pages."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring."""
        if obj.docstring:
            obj.docstring.value = fenced(PAGE.sub(link, obj.docstring.value))


# Only private code names what is in `docs/upstream/`.
PAGE = re.compile(r"`?\bdocs/((?!upstream/)\w+/\w+)\.md\b`?")


def link(path: re.Match[str]) -> str:
    """Return a link to a page that a docstring names."""
    page = Path(__file__).parent / f"{path[1]}.md"
    title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title}](../{path[1]}.html)"


def fenced(text: str) -> str:
    """Return a docstring with its examples in fences."""
    lines: list[str] = []
    inside = False
    for line in [*text.split("\n"), ""]:
        if not inside and line.startswith(">>> "):
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join(lines[:-1])
