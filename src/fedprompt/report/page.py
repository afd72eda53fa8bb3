"""The building blocks of a page that needs nothing but itself.

Every function takes plain text and escapes it, except where it says markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fedprompt.report.tables import Cell

STYLE = """
:root { color-scheme: light dark;
  --ink: #24292f; --grid: #d5dae0; --paper: #ffffff; --quiet: #57606a; --shade: #f5f7f9; --warn: #9a5b00; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e2e6ea; --grid: #3a424b; --paper: #14181d; --quiet: #9aa4ae; --shade: #1d232a; --warn: #e3b341; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 80rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--grid); }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p, figcaption, dt { color: var(--quiet); }
.warn { color: var(--warn); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .35rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
thead th { color: var(--quiet); font-weight: 600; }
tbody th { font-weight: 600; }
th:first-child { position: sticky; left: 0; max-width: 12rem; padding-left: 0; background: var(--paper);
  text-align: left; white-space: normal; overflow-wrap: break-word; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.5rem;
  align-items: end; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .9rem; }
svg, img { display: block; max-width: 100%; height: auto; }
details { margin: .5rem 0; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; padding: .75rem 1rem; background: var(--shade); border-radius: 6px;
  font-size: .85rem; line-height: 1.4; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; font-size: .9rem; }
dd { margin: 0; }
"""

#: the browser itself refuses whatever is not in the file
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, body: str) -> str:
    """A whole page around markup."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str, level: int = 2) -> str:
    """A heading and the markup below it."""
    return "\n".join([f"<section>\n<h{level}>{escape(title)}</h{level}>", *parts, "</section>"])


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def folded(title: str, markup: str) -> str:
    return f"<details>\n<summary>{escape(title)}</summary>\n{markup}\n</details>"


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in pairs) + "</dl>"


def table(name: str, head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Wide tables scroll in a box of their own, which the keyboard can reach; the first column stays in sight."""
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    lines = "\n".join(f"<tr>{''.join(_cell(cell, number) for number, cell in enumerate(row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">\n'
        f"<table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table>\n</div>"
    )


def _cell(cell: Cell, number: int) -> str:
    text = f"<strong>{escape(cell.text)}</strong>" if cell.bold else escape(cell.text)
    return f"<td>{text}</td>" if number else f'<th scope="row">{text}</th>'


def picture(svg: str, caption: str) -> str:
    """An inline `<svg>` with its caption, which screen readers get in place of the drawing."""
    drawing = svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
    return f"<figure>\n{drawing}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"
