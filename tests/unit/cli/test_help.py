"""Help, completion and suggestions of the whole command tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from support import run
from typer.main import get_command

from fedprompt.cli import app, completion

pytestmark = pytest.mark.unit


def commands(command: Any, name: str = "fedprompt") -> Iterator[tuple[str, Any]]:
    yield name, command
    for inner, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{name} {inner}")


TREE = list(commands(get_command(app)))


def test_the_whole_tree_is_walked() -> None:
    assert {"fedprompt init", "fedprompt protocol sweep", "fedprompt node waiting"} <= {name for name, _ in TREE}


@pytest.mark.parametrize(("name", "command"), TREE, ids=[name for name, _ in TREE])
def test_every_command_argument_and_option_has_help(name: str, command: Any) -> None:
    assert (command.help or "").strip()
    lacking = [each.name for each in command.params if each.name != "help" and not getattr(each, "help", None)]
    assert lacking == []


def test_commands_are_in_groups() -> None:
    outside = [name for name, each in get_command(app).commands.items() if not each.rich_help_panel]  # type: ignore[attr-defined]
    assert outside == []


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [(("rnu",), "'run'"), (("protocol", "swep"), "'sweep'"), (("run", "--resum"), "--resume")],
)
def test_a_misspelt_command_or_option_gets_one_suggestion(
    fedprompt: Any, arguments: tuple[str, ...], suggestion: str
) -> None:
    told = fedprompt(*arguments)
    assert told.code == 2
    assert told.err.count(suggestion) == 1, told.err


@pytest.mark.parametrize(
    ("incomplete", "found"),
    [
        ("federation.ro", ["federation.rounds="]),
        ("train.optimizer=ad", ["train.optimizer=adam", "train.optimizer=adamw"]),
        ("partition.scheme=dirichlet_", ["partition.scheme=dirichlet_in_domains"]),
        ("method=fedvpt_", ["method=fedvpt_deep"]),
        (
            "method.promp",
            ["method.prompt_tokens=", "method.prompt_init=", "method.prompt_depth=", "method.prompt_epochs="],
        ),
        ("backbone.autocast=t", ["backbone.autocast=true"]),
        ("nothing=", []),
    ],
)
def test_settings_and_their_values_are_completed(incomplete: str, found: list[str]) -> None:
    offered = completion.complete_override(typer.Context(click.Command("run")), incomplete)
    assert set(offered) <= set(found)
    assert offered[:1] == found[:1]


@pytest.mark.parametrize(("before", "incomplete"), [(["train.optimizer"], "="), (["train.optimizer", "="], "ad")])
def test_values_are_completed_where_the_shell_splits_at_the_equals_sign(before: list[str], incomplete: str) -> None:
    context = typer.Context(click.Command("run"))
    context.params = {"overrides": before}
    assert {"adam", "adamw"} <= set(completion.complete_override(context, incomplete))


def test_runs_are_completed_with_folders_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/demo-a", "runs/demo-b", "runs/other", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/demo-a/run.db").touch()
    assert completion.complete_run("r") == ["runs/"]
    assert completion.complete_run("runs/d") == ["runs/demo-a", "runs/demo-b/"]


def test_clients_of_the_run_that_was_typed_are_completed(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(settings(method={"name": "head_tune"}, federation={"rounds": 1}))
    monkeypatch.setenv("COMP_WORDS", f"fedprompt predict {done.directory} --client cl")
    assert completion.complete_client("cl") == [f"client_{number}" for number in range(4)]
    monkeypatch.setenv("COMP_WORDS", f"fedprompt predict {tmp_path} --client cl")
    assert completion.complete_client("cl") == []
