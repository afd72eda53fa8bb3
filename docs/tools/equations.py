"""MkDocs hook: equations become MathML while the site is built, so that its pages need no script and no network.

`$...$` and `$$...$$` in a page are LaTeX, which GitHub draws as well. Arithmatex marks them, this hook converts the marks.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

MARKED = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
UNREAD = re.compile(r"\\[A-Za-z]+|&amp;")  # what the converter does not know it leaves as text


def on_page_content(text: str, page: Any, **_: Any) -> str:
    return MARKED.sub(lambda found: equation(found, page.file.src_uri), text)


def equation(found: re.Match[str], where: str) -> str:
    tag, source = found.group(1), html.unescape(found.group(2)).strip()
    try:
        drawn = convert(source, display="block" if tag == "div" else "inline")
    except Exception as error:  # its errors have no base class of their own
        raise ValueError(f"{where}: {type(error).__name__} in the equation {source!r}") from error
    left = UNREAD.search(re.sub(r"<annotation.*?</annotation>", "", drawn, flags=re.DOTALL))
    if left:
        raise ValueError(f"{where}: {left.group()!r} cannot be drawn in the equation {source!r}")
    return f'<{tag} class="equation" tabindex="0">{drawn}</{tag}>' if tag == "div" else drawn
