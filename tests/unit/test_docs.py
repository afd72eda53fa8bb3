"""What the documents show is what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import offer_method

from fedprompt import config, errors, registry

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


def test_the_worked_example_of_a_new_method_runs(tmp_path: Path, settings: Any) -> None:
    text = (ROOT / "docs/adding_a_method.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "prompted_bias.py").write_text(code)
    offer_method(tmp_path, "prompted_bias")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings(method={"name": "prompted_bias", "tokens": 2})))
    command = (
        "import sys; from fedprompt.cli import main; sys.argv = ['fedprompt', 'run', 'config.yaml', '--json']; main()"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"label": "prompted_bias"' in done.stdout


def test_every_exit_code_is_documented() -> None:
    table = (ROOT / "docs/cli.md").read_text()
    codes = {each.exit_code for each in errors.FedpromptError.__subclasses__()}
    assert len(codes) == len(errors.FedpromptError.__subclasses__()), "one code each"
    for code in codes:
        assert f"| {code} |" in table


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_in_the_project_is_valid_and_says_how_to_launch_it(path: Path) -> None:
    for each in config.load(path):
        registry.build(each.method, each.variant)
    assert "fedprompt run" in path.read_text().split("\n\n")[0]


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_every_link_to_a_file_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target
