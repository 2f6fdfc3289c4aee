"""Formulas as MathML, which browsers draw by themselves: nothing is loaded from elsewhere.

MkDocs takes this file as a hook for pages (``$...$``, ``$$...$$``), mkdocstrings as an extension for docstrings
(``.. math::``, ``:math:`...```, and roles such as ``:func:`...```, which become code).
"""

import re
import textwrap
from typing import Any

from griffe import Docstring, Extension
from latex2mathml.converter import convert


def mathml(tex: str, display: str = "inline") -> str:
    """One formula. Several lines with ``&`` are aligned."""
    tex = " ".join(tex.split())
    if "&" in tex or "\\\\" in tex:
        tex = rf"\begin{{aligned}} {tex} \end{{aligned}}"
    formula = re.sub(r"&#x([0-9A-F]+);", lambda found: _character(int(found[1], 16)), convert(tex, display=display))
    # Markdown takes an unknown element at the start of a line for a block, but knows that a span is none
    return formula if display == "block" else f"<span>{formula}</span>"


def _character(code: int) -> str:
    return {0x26: "&amp;", 0x3C: "&lt;", 0x3E: "&gt;"}.get(code, chr(code))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace formulas outside code."""
    parts = re.split(r"(^```.*?^```[^\n]*$|`[^`\n]*`)", markdown, flags=re.DOTALL | re.MULTILINE)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"\$\$(.+?)\$\$", lambda m: mathml(m[1], "block"), parts[i], flags=re.DOTALL)
        parts[i] = re.sub(r"\$([^$\n]+)\$", lambda m: mathml(m[1]), parts[i])
    return "".join(parts)


class Formulas(Extension):
    """Rewrite docstrings before they are parsed."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called once for every object."""
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = rewrite(obj.docstring.value)


def rewrite(text: str) -> str:
    """reStructuredText's mathematics and roles in Markdown's terms."""
    block = re.compile(r"^( *)\.\. math::(.*(?:\n(?:\1 +.*)?)*)", re.MULTILINE)
    text = block.sub(lambda m: f"{m[1]}{mathml(textwrap.dedent(m[2]), 'block')}\n\n", text)
    text = re.sub(r":math:`([^`]+)`", lambda m: mathml(m[1]), text)
    return re.sub(r":(?:func|class|meth|data|mod|attr):`(~?)([^`]+)`", _role, text)


def _role(found: re.Match[str]) -> str:
    return f"`{found[2].rsplit('.', 1)[-1] if found[1] else found[2]}`"
