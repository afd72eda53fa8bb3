"""`--plugin` with real processes: commands, workers, nodes that Flower simulates, and files that must not be loaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import content
from warm_processes import command_line

from fedprompt.cli import app
from fedprompt.runs.run import Run

pytestmark = pytest.mark.e2e

PLUGIN = '''"""A method, a rule and a partition of somebody else."""

from dataclasses import dataclass

from fedprompt import WithHead, Roles, register, register_aggregator, register_partition


@register("plain_head")
@dataclass(frozen=True)
class PlainHead(WithHead):
    """A head and nothing else."""

    def init(self, world, generator):
        return self.with_head(world, Roles())


@register_aggregator("last")
def last(tensors, weights, around=None):
    """The client that came last."""
    return tensors[-1]


@register_partition("stripes")
def stripes(supply, clients, seed, *, offset: int = 0):
    """Every n-th image."""
    return [(supply.train[k::clients], supply.test[(k + offset) % clients :: clients]) for k in range(clients)]
'''

USES = {
    "method": {"name": "plain_head", "head": "shared"},
    "aggregation": {"rule": "last"},
    "partition": {"scheme": "stripes", "clients": 3, "options": {"offset": 1}},
}


@pytest.fixture
def fedprompt(tmp_path: Path, settings: Any) -> Any:
    """The command line in a folder with a plugin and a config that needs it."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings(**USES, federation={"rounds": 1})))
    return command_line(tmp_path)


def the_run(folder: Path, name: str) -> Run:
    return Run(folder / "runs" / f"{name}-plain_head-seed0")


def test_a_plugin_serves_a_run_its_workers_and_what_is_done_with_it(fedprompt: Any, tmp_path: Path) -> None:
    for name, workers in (("alone", 0), ("shared", 2)):
        overrides = [f"name={name}", f"engine.workers={workers}", "engine.cohort=1"]
        done = fedprompt("run", "config.yaml", *overrides, "--quiet", "--plugin", "mine.py")
        assert done.returncode == 0, done.stderr
    assert content(the_run(tmp_path, "alone")) == content(the_run(tmp_path, "shared"))
    compared = fedprompt("compare", "runs", "--json")  # without the plugin: it reads the run file only
    assert compared.returncode == 0, compared.stderr
    assert "plain_head" in compared.stdout
    audit = ["audit", "runs/alone-plain_head-seed0", "--json"]
    alone = fedprompt(*audit)
    assert alone.returncode == 2, alone.stderr
    assert "method.name must be one of" in alone.stderr
    assert "plain_head" not in alone.stderr.partition("got")[0]
    assert fedprompt(*audit, "--plugin", "mine.py").returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed")
def test_nodes_that_flower_simulates_know_the_plugin(fedprompt: Any, tmp_path: Path) -> None:
    overrides = ["name=nodes", "engine.kind=flower-simulation", "engine.workers=1"]
    done = fedprompt("run", "config.yaml", *overrides, "--quiet", "--plugin", "mine.py")
    assert done.returncode == 0, done.stderr
    assert the_run(tmp_path, "nodes").finished


def test_configs_are_checked_and_divided_with_a_plugin(fedprompt: Any, tmp_path: Path) -> None:
    good = fedprompt("validate", "config.yaml", "--plugin", "mine.py")
    assert (good.returncode, good.stdout[:4]) == (0, "ok  "), good.stderr
    bad = fedprompt("validate", "config.yaml", "partition.options.offset=x", "--plugin", "mine.py")
    assert bad.returncode == 2
    assert "partition.options.offset must be a valid integer, got 'x'" in bad.stderr
    shown = fedprompt("partition", "config.yaml", "--plugin", "mine.py")
    assert (shown.returncode, shown.stdout[:9]) == (0, "3 clients"), shown.stderr
    listed = fedprompt("methods", "plain_head", "--plugin", "mine.py")
    assert "A head and nothing else." in listed.stdout
    assert "finetune_epochs = 5    Epochs on the head" in listed.stdout


def test_a_config_never_makes_a_file_be_loaded(fedprompt: Any, tmp_path: Path) -> None:
    """Not one that lies beside it under the very name it asks for, nor one that it names."""
    (tmp_path / "stripes.py").write_text(PLUGIN)
    for overrides in ([], ["partition.scheme=stripes.py"], ["plugin=mine.py"]):
        done = fedprompt("validate", "config.yaml", *overrides)
        assert done.returncode == 2, done.stdout
        assert "must be one of" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--plugin must be a Python file (.py) that exists, got"),
        ("x = 1", "--plugin must register something"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (PLUGIN.replace("stripes", "iid"), "partition.scheme must be registered once, got 'iid' from fedprompt."),
        (PLUGIN.replace("plain_head", "fedvpt"), "method.name must be registered once, got 'fedvpt' from"),
    ],
)
def test_a_bad_plugin_ends_a_command(fedprompt: Any, tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "bad.py").write_text(content)
    done = fedprompt("methods", "--plugin", "bad.py")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_that_needs_names_takes_plugins() -> None:
    import typer.main

    group = typer.main.get_command(app)
    commands = dict(group.commands)  # type: ignore[attr-defined]
    for name in ("protocol", "federate"):
        commands |= {f"{name} {each}": command for each, command in commands.pop(name).commands.items()}
    without = {name for name, each in commands.items() if not any(p.name == "plugin" for p in each.params)}
    own = {"demo", "compare", "report", "verify", "dashboard", "schema", "assets", "doctor", "configs"}
    assert without == own | {f"federate {each}" for each in ("init", "check", "status", "admit", "expel", "renew")}
