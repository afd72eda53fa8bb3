"""Every command that a document shows can be given: it exists, has these options, and its config is a valid one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import click
import documents
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from fedprompt.backbones.random_weights import TINY_CLIP_SHAPE, random_vit, tiny_clip
from fedprompt.cli import app
from fedprompt.config import config_files
from fedprompt.core import registry
from fedprompt.core.method import World

pytestmark = pytest.mark.unit

ALL = [
    pytest.param(words, id=f"{documents.name(page)}-{number}")
    for page in documents.PAGES
    for number, words in enumerate(documents.commands(page))
    if "--plugin" not in words  # it would be run; see test_extending.py
]
OF_METHODS = [
    pytest.param(page.stem, words, id=f"{page.stem}-{number}")
    for page in documents.METHOD_PAGES
    for number, words in enumerate(documents.commands(page))
]


@cache
def _program() -> Any:
    return typer.main.get_command(app)


@cache
def _world_of_the_demo() -> World:
    digits = tuple("0123456789")
    language = tiny_clip(random_vit(TINY_CLIP_SHAPE)).language(digits)
    return World(384, 12, 17, 14, digits, tuple("abcdef"), language=language)


def parsed(words: list[str]) -> dict[str, Any]:
    """What the command line understands of a command, without doing it."""
    command: Any = _program()
    rest = list(words)
    while hasattr(command, "commands") and (rest[0] in command.commands or not command.invoke_without_command):
        command = command.commands[rest.pop(0)]
    context: click.Context = command.make_context(command.name, rest)
    return context.params


@pytest.fixture(scope="module")
def made_by_init(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config that `fedprompt init photos` writes, which the quickstart goes on with."""
    folder = tmp_path_factory.mktemp("quickstart")
    for number in range(12):
        path = folder / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number,) * 3).save(path)
    words = ["init", str(folder / "photos"), "--backbone", "tiny", "--output", str(folder / "photos.yaml")]
    assert CliRunner().invoke(app, words).exit_code == 0
    return folder / "photos.yaml"


@pytest.mark.parametrize("words", ALL)
def test_every_command_shown_is_one_that_can_be_given(words: list[str], made_by_init: Path) -> None:
    given = parsed(words)
    if given.get("config") is not None:
        asked = [f"privacy.target_epsilon={given['target_epsilon']}"] if given.get("target_epsilon") else []
        path = made_by_init if str(given["config"]) == made_by_init.name else given["config"]
        made = config_files.load(path, [*(given.get("overrides") or []), *asked])
        assert made
        for each in made:
            registry.build(each.method, each.variant)


@pytest.mark.parametrize(("name", "words"), OF_METHODS)
def test_the_command_of_a_method_describes_one_run_of_it_that_it_accepts(name: str, words: list[str]) -> None:
    given = parsed(words)
    (made,) = config_files.load(given["config"], list(given["overrides"]))
    assert name in (made.method["name"], (made.variant or {}).get("name"))
    registry.build(made.method, made.variant).check(_world_of_the_demo(), registry.completed(made).train)


@pytest.mark.parametrize("page", documents.METHOD_PAGES, ids=lambda page: page.stem)
def test_every_method_shows_a_command(page: Any) -> None:
    assert documents.commands(page)
