"""Names, settings and third-party methods."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import offer_method

from fedprompt.core import registry
from fedprompt.core.method import Method
from fedprompt.errors import ConfigError

pytestmark = pytest.mark.unit


def test_the_methods_of_this_package_are_there() -> None:
    assert {"local", "head_tune", "fedvpt", "fedvpt_deep"} <= set(registry.methods())
    assert {"fedprox", "scaffold", "fedper", "fedrep", "fedbabu", "ditto"} <= set(registry.variants())


def test_an_unknown_method_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"method\.name must be one of .*fedvpt.*, got 'fedvtp'"):
        registry.build({"name": "fedvtp"})


def test_an_unknown_setting_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"method\.lenght is not a setting of fedvpt; it has .*prompt_tokens"):
        registry.build({"name": "fedvpt", "lenght": 3})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_tokens": -1}, r"method\.prompt_tokens must be greater than or equal to 0, got -1"),
        ({"prompt_tokens": "4"}, r"method\.prompt_tokens must be a valid integer, got '4'"),
        ({"head": "mine"}, r"method\.head must be 'local', 'shared' or 'shared_then_finetune', got 'mine'"),
        ({"depth": 0}, r"method\.depth.* must be greater than or equal to 1, got 0"),
    ],
)
def test_a_bad_setting_is_told_by_field_rule_and_value(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.build({"name": "fedvpt", **settings})


def test_a_variant_wraps_the_method() -> None:
    built = registry.build({"name": "fedvpt", "head": "shared"}, {"name": "fedprox", "mu": 0.5})
    assert (built.mu, built.inner.head) == (0.5, "shared")  # type: ignore[attr-defined]


def test_the_hash_covers_defaults_that_were_not_written_down() -> None:
    from fedprompt import config

    short = config.parse({"method": "fedvpt"})
    long = config.parse({"method": {"name": "fedvpt", "prompt_tokens": 10}})
    assert registry.completed(short).digest() == registry.completed(long).digest() != short.digest()


def test_a_name_is_given_once() -> None:
    with pytest.raises(ConfigError, match="registered once"):

        @registry.register("fedvpt")
        @dataclass(frozen=True)
        class Impostor(Method):
            pass


def test_a_method_must_be_a_frozen_dataclass() -> None:
    with pytest.raises(ConfigError, match="frozen dataclass"):

        @registry.register("loose")
        class Loose:
            pass


def test_help_comes_from_the_comments_beside_the_fields() -> None:
    rows = {row["name"]: row for row in registry.describe(registry.methods()["fedvpt"])}
    assert rows["prompt_tokens"]["default"] == 10
    assert "learnable tokens" in rows["prompt_tokens"]["help"]


def test_every_setting_of_every_method_is_explained() -> None:
    tables = {**registry.methods(), **registry.variants()}
    silent = [(name, row["name"]) for name, cls in tables.items() for row in registry.describe(cls) if not row["help"]]
    assert silent == []


def test_another_package_registers_a_method_through_an_entry_point(tmp_path: Path) -> None:
    """A real distribution on the path: a module and the metadata an installer would write."""
    (tmp_path / "their_package.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedprompt import register\n"
        "from fedprompt.methods.head_tune import HeadTune\n"
        "@register('theirs')\n"
        "@dataclass(frozen=True)\n"
        "class Theirs(HeadTune):\n"
        "    'A method from somewhere else.'\n"
    )
    offer_method(tmp_path, "their_package")
    code = "from fedprompt.core import registry; print(registry.build({'name': 'theirs'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.strip() == "Theirs(head='shared', finetune_epochs=5)", done.stderr


def test_a_broken_entry_point_is_told_by_name(tmp_path: Path) -> None:
    offer_method(tmp_path, "no_such_module")
    code = "from fedprompt.cli import main; import sys; sys.argv = ['fedprompt', 'methods']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "'theirs'" in done.stderr
    assert "no_such_module" in done.stderr
