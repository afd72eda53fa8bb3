"""What the hooks of the site do to a page: links that leave docs/, lists, equations."""

from __future__ import annotations

from types import SimpleNamespace

import documents
import pytest
from support import module_at

pytestmark = pytest.mark.unit
pytest.importorskip("mkdocs", reason="needs mkdocs (pip install '.[docs]')")


hooks, equations = (module_at(documents.ROOT / f"docs/tools/{name}.py") for name in ("hooks", "equations"))
PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))


@pytest.mark.parametrize(
    ("link", "turned"),
    [
        ("../src/fedprompt/configs/demo.yaml", "repository/src/fedprompt/configs/demo.yaml.md"),
        ("../benchmarks/speed/README.md#toy", "repository/benchmarks/speed/README.md#toy"),
        ("../benchmarks/speed/bench.json", "repository/benchmarks/speed/bench.json"),
        ("../CHANGELOG.md", "changelog.md"),
        ("data.md#sources", "data.md#sources"),
        ("https://flower.ai", "https://flower.ai"),
        ("#here", "#here"),
    ],
)
def test_links_of_a_page_are_turned(link: str, turned: str) -> None:
    assert hooks.relink(f"see [it]({link}).", "docs/page.md", "page.md") == f"see [it]({turned})."


def test_links_of_a_page_in_a_folder_are_turned_from_there() -> None:
    text = "[a](../../src/fedprompt/configs/demo.yaml) [b](../data.md)"
    turned = "[a](../repository/src/fedprompt/configs/demo.yaml.md) [b](../data.md)"
    assert hooks.relink(text, "docs/methods/page.md", "methods/page.md") == turned


def test_links_of_a_file_outside_docs_lead_into_the_site() -> None:
    text = "[a](../../docs/scale.md#measured) [b](bench.json)"
    uri = "repository/benchmarks/speed/README.md"
    assert hooks.relink(text, "benchmarks/speed/README.md", uri) == "[a](../../../scale.md#measured) [b](bench.json)"


def test_blocks_of_code_keep_their_links() -> None:
    text = "```\n[a](../configs/demo.yaml)\n```\n"
    assert hooks.relink(text, "docs/page.md", "page.md") == text


def test_a_list_behind_a_paragraph_is_set_apart_and_nothing_else_is() -> None:
    assert hooks.spaced("text\n- a\n  more\n- b\n") == "text\n\n- a\n  more\n- b\n"
    assert hooks.spaced("```\ntext\n- a\n```\n") == "```\ntext\n- a\n```\n"


def test_equations_become_mathml() -> None:
    shown = equations.on_page_content('<div class="arithmatex">\\[P_k \\leftarrow \\sum_k p_k\\]</div>', PAGE)
    assert "<math" in shown
    assert 'display="block"' in shown
    assert "\\" not in shown
    assert "<math" in equations.on_page_content('<span class="arithmatex">\\(a &lt; b\\)</span>', PAGE)


def test_an_equation_that_cannot_be_drawn_ends_the_build() -> None:
    with pytest.raises(ValueError, match=r"page\.md: '\\\\nonsense' cannot be drawn"):
        equations.on_page_content('<span class="arithmatex">\\(\\nonsense x\\)</span>', PAGE)
