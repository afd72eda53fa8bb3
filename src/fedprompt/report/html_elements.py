"""The building blocks of a self-contained page.

Every function takes plain text and escapes it, except arguments called markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape as markup_escape

from fedprompt.io.safe_text import safe_text
from fedprompt.report.comparison_table import Cell
from fedprompt.report.stylesheet import STYLE

# the browser refuses everything that is not in the file
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def escape(text: str) -> str:
    """Text from anywhere as markup that shows it."""
    return markup_escape(safe_text(text))


def document(title: str, lead: str, body: str, contents: Iterable[tuple[str, str]] = ()) -> str:
    """A whole page around markup; `contents` are titles of sections with their ids."""
    links = "".join(f'<li><a href="#{escape(anchor)}">{escape(name)}</a></li>' for anchor, name in contents)
    nav = f'<nav aria-label="Contents">\n<ul>{links}</ul>\n</nav>\n' if links else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the results</a>\n'
        f"<header>\n<h1>{escape(title)}</h1>\n{lead}\n</header>\n{nav}"
        f'<main id="main" tabindex="-1">\n{body}\n</main>\n</body>\n</html>\n'
    )


def slug(text: str) -> str:
    """Letters and digits of a text, for an id or the name of a file."""
    return re.sub(r"[^a-z0-9_.=]+", "-", text.lower()).strip("-.") or "x"


def section(title: str, *parts: str, level: int = 2, half: bool = False) -> str:
    """A heading and the markup below it; the contents list those of level 2. Two half-width ones are side by side if they fit."""
    anchor = f' id="{slug(title)}"' if level == 2 else ""
    opening = '<section class="half">' if half else "<section>"
    return "\n".join([f"{opening}\n<h{level}{anchor}>{escape(title)}</h{level}>", *filter(None, parts), "</section>"])


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def notes(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="notes">{items}</ul>' if items else ""


def folded(title: str, markup: str, kind: str = "") -> str:
    """Opened by a click or a key, and on paper; a kind `screen` is not printed at all."""
    opening = f'<details class="{kind}">' if kind else "<details>"
    return f"{opening}\n<summary>{escape(title)}</summary>\n{markup}\n</details>"


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in pairs) + "</dl>"


def table(
    name: str,
    head: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    groups: Sequence[tuple[str, int]] = (),
    kind: str = "",
) -> str:
    """Wide tables scroll in their own box, which the keyboard can reach; the first column stays visible.

    `groups` are headings above the columns: a title and its number of columns.
    """
    above = "".join(f'<th colspan="{span}" scope="colgroup">{escape(title)}</th>' for title, span in groups)
    titles = "".join(f'<th scope="col">{breakable(escape(title))}</th>' for title in head)
    top = f"<tr><td></td>{above}</tr>" if above else ""
    lines = "\n".join(f"<tr>{''.join(_cell(cell, number) for number, cell in enumerate(row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">\n'
        f"<table{f' class={kind!r}' if kind else ''}>\n<thead>{top}<tr>{titles}</tr></thead>\n"
        f"<tbody>\n{lines}\n</tbody>\n</table>\n</div>"
    )


def _cell(cell: Cell, number: int) -> str:
    text = f"<strong>{escape(cell.text)}</strong>" if cell.bold else escape(cell.text)
    return f"<td>{text}</td>" if number else f'<th scope="row">{breakable(text)}</th>'


def breakable(markup: str) -> str:
    """Long names of settings may break after a dot or an underscore, numbers may not."""
    return re.sub(r"(?<=[A-Za-z][._])(?=[A-Za-z])", "<wbr>", markup)


def picture(svg: str, caption: str) -> str:
    """An inline `<svg>` with its caption, which screen readers read instead of the drawing."""
    drawing = svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
    return f"<figure>\n{drawing}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def pictures(figures: Iterable[str]) -> str:
    return f'<div class="pictures">\n{"".join(figures)}\n</div>'
