"""docs/settings.md: a row for every setting, with what the model says; old rows are found."""

from __future__ import annotations

import re
from pathlib import Path

import documents
import pytest
import settings_page
from support import module_at

from fedprompt.config import Config

pytestmark = pytest.mark.unit

PAGE = documents.ROOT / "docs/settings.md"
generate = module_at(documents.ROOT / "docs/tools/generate.py")


def test_every_setting_has_a_row_in_its_section() -> None:
    text = PAGE.read_text()
    for name, model in settings_page.sections():
        part = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) == list(model.model_fields), name
    top = text.partition("\n## Of the experiment\n")[2].partition("\n## ")[0]
    named = [name for name, _ in settings_page.sections()]
    assert re.findall(r"^\| `(\w+)` \|", top, re.MULTILINE) == [
        name for name in Config.model_fields if name not in named
    ]


def test_every_setting_is_described_in_a_sentence() -> None:
    for name, model in [("", Config), *settings_page.sections()]:
        for key, field in model.model_fields.items():
            said = field.description or ""
            assert re.fullmatch(r"[A-Z].*\.", said, re.DOTALL), f"{name}.{key} needs a docstring below it, got {said!r}"


@pytest.mark.parametrize(
    "row",
    [
        "| `weight_decay` | number, ≥ 0 | `0.0` | Weight decay: in the gradient of SGD and Adam, beside it with AdamW. |",
        "| `kind` | `nan`, `scale`, `sign_flip`, `label_flip`, `forged_weight`, `free_rider` | required | What malicious clients do",
        "| `lrs` | map of text to number, ≥ 0 or text, like `^\\d+(\\.\\d+)?%$` | `{}` |",
        "| `mean` | list of 3 × number or null | `null` |",
        "| `device` | text, like `^(cpu\\|mps\\|cuda(:\\d+)?)$` | `cpu` |",
    ],
)
def test_rows_tell_type_range_default_and_meaning(row: str) -> None:
    assert row in PAGE.read_text()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SETTINGS", "Learning rate of every tensor"),
        ("SCHEMA", "Learning rate of every tensor"),
        ("REFERENCE", "Where clients run"),
    ],
)
def test_an_old_file_is_found_and_renewed(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Path = getattr(generate, name)
    copy = tmp_path / original.name
    copy.write_text(original.read_text().replace(text, "Old text"))
    monkeypatch.setattr(generate, name, copy)
    monkeypatch.setattr(generate, "pages", dict)  # those have tests of their own
    assert generate.stale() == [copy.name]
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert copy.read_text() == original.read_text()
