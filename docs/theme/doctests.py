"""Examples in docstrings as code: an extension of griffe, which reads the docstrings.

Google's style has the examples under `Examples:`. Ours follow the sentence that they show, and
Markdown would take their `>>>` for quotations.
"""

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Puts a fence around each paragraph that begins with `>>>`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring."""
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


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
