"""What `from fedprompt import ...` offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fedprompt

pytestmark = pytest.mark.unit

PROMISED = {
    "Method",
    "Roles",
    "Statistic",
    "World",
    "Batch",
    "Prompts",
    "Seen",
    "Stage",
    "Client",
    "Server",
    "Upload",
    "Progress",
    "Mixture",
    "Combine",
    "TokenPrompt",
    "TextContext",
    "WithHead",
    "WithText",
    "WithLocal",
    "Tensors",
    "register",
    "register_variant",
    "register_aggregator",
    "register_source",
    "register_partition",
    "register_backbone",
    "register_engine",
    "Source",
    "Experiment",
    "Config",
    "Run",
    "TrainedClient",
    "Observer",
    "LocalUpdate",
    "errors",
}


def test_what_authors_need_is_there() -> None:
    assert set(fedprompt.__all__) >= PROMISED


def test_every_name_can_be_imported() -> None:
    for name in fedprompt.__all__:
        assert getattr(fedprompt, name) is not None


def test_help_lists_the_public_names_and_no_others() -> None:
    assert dir(fedprompt) == sorted(fedprompt.__all__)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, fedprompt; dir(fedprompt); sys.exit(bool({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Methods'"):
        _ = fedprompt.Methods


def test_a_name_of_earlier_versions_says_what_it_is_called_now() -> None:
    with pytest.raises(
        AttributeError, match=r"VisionPrompt is called TokenPrompt now, and Prompts\.vision is Prompts\.tokens"
    ):
        _ = fedprompt.VisionPrompt


def test_type_checkers_see_every_name(tmp_path: Path) -> None:
    """`__getattr__` would let them take any name for anything; only what is imported for them has a type."""
    import ast

    tree = ast.parse(Path(fedprompt.__file__).read_text())
    seen = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(fedprompt.__all__) - {"__version__"} <= seen
