"""MkDocs hook: what lies outside docs/ becomes part of the site where a page links to it.

On GitHub a link such as `../src/fedprompt/configs/demo.yaml` opens the file. A site that is read from a disk has no GitHub, so the file
becomes a page below `repository/` (JSON stays what it is), and the link leads there. CHANGELOG.md becomes the page of
changes in the same way. Pages of methods stand in the navigation by their groups, without being named in mkdocs.yml.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from method_pages import PAGES, navigation
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^(```|~~~).*?^\1`*\s*$", re.DOTALL | re.MULTILINE)
BEGUN = re.compile(r"^((?![-*] |\d+\. |\s|#).+)\n(?=[-*] |\d+\. )", re.MULTILINE)  # the line before a list
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml"}
MOST_BYTES = 2_000_000
CHANGES = "changelog.md"


def on_config(config: Any) -> Any:
    """Let the pages of methods follow what mkdocs.yml has under Methods."""
    (methods,) = (entry["Methods"] for entry in config.nav if "Methods" in entry)
    methods += navigation(PAGES)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside docs/ that a page, or such a file, links to."""
    add_page(files, config, CHANGES, (ROOT / "CHANGELOG.md").read_text(), "CHANGELOG.md")
    waiting = [(f"docs/{each.src_uri}", each.content_string) for each in files.documentation_pages()]
    waiting.append(("benchmarks", "[](speed/README.md)"))  # in the navigation
    while waiting:
        origin, text = waiting.pop()
        for target in outside(text, origin):
            path = ROOT / target
            if page_of(target) in files.src_uris or not path.is_file():
                continue  # a link to nothing stays as it is, and MkDocs complains
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"{origin} links to {target}, which is too large for the site")
            content = path.read_text()
            if path.suffix == ".json":
                files.append(File.generated(config, page_of(target), content=content))
            else:
                add_page(files, config, page_of(target), as_page(target, content), target)
            if path.suffix == ".md":
                waiting.append((target, content))
    return files


def add_page(files: Files, config: Any, uri: str, text: str, origin: str) -> None:
    """A page that is made here; its links are read as those of `origin`, a path from the root of the project."""
    files.append(File.generated(config, uri, content=relink(text, origin, uri)))


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    return spaced(text if page.file.generated_by else relink(text, f"docs/{uri}", uri))


def spaced(text: str) -> str:
    """With an empty line before every list: GitHub needs none after a paragraph, the parser of the site does."""
    return outside_fences(text, lambda part: BEGUN.sub(r"\1\n\n", part))


def outside(text: str, origin: str) -> list[str]:
    """Paths from the root of the project to what a text links to outside docs/."""
    found: list[str] = []
    outside_fences(text, lambda part: found.extend(resolve(match[2], origin) for match in LINK.finditer(part)) or part)
    return [path for path in found if path and not path.startswith("docs/")]


def relink(text: str, origin: str, uri: str) -> str:
    """The text with links that hold for `origin` turned into links that hold for the page `uri` of the site."""

    def turned(match: re.Match[str]) -> str:
        path = resolve(match[2], origin)
        if not path:
            return match[0]
        goal = path.removeprefix("docs/") if path.startswith("docs/") else page_of(path)
        return f"{match[1]}{posixpath.relpath(goal, posixpath.dirname(uri) or '.')}{match[3] or ''}{match[4]}"

    return outside_fences(text, lambda part: LINK.sub(turned, part))


def resolve(link: str, origin: str) -> str:
    """The path from the root of the project that a relative link means; empty for an address."""
    if ":" in link or link.startswith("/"):
        return ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def page_of(path: str) -> str:
    """Where the site has a file from outside docs/."""
    if path == "CHANGELOG.md":
        return CHANGES
    if path == "README.md":
        return "index.md"
    return f"repository/{path}" if path.endswith((".md", ".json")) else f"repository/{path}.md"


def as_page(path: str, content: str) -> str:
    """A file as Markdown; kept out of the search, where it would drown the documentation."""
    front = "---\nsearch: {exclude: true}\n---\n\n"
    if path.endswith(".md"):
        return content
    return f"{front}# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{content.rstrip()}\n````\n"


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Apply a change to a text, but not to its blocks of code."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, change(text[end:])])
