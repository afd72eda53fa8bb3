"""`fedprompt partition --show`: who holds what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.unit


@pytest.fixture
def config(settings: Any, tmp_path: Path) -> str:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings()))
    return "tiny.yaml"


def test_domains_are_shown_where_they_differ_between_clients(fedprompt: Any, config: str) -> None:
    told = fedprompt("partition", config, "--show")
    held = json.loads(fedprompt("partition", config, "--json").out)["clients"]
    assert [list(client["domains"].values()) for client in held] == [[20]] * 4  # 4 images of each of 5 classes
    assert len({name for client in held for name in client["domains"]}) == 4
    for client in held:
        (name,) = client["domains"]
        assert f"[{name} 20]" in told.out


def test_domains_are_not_shown_where_all_clients_have_the_same(fedprompt: Any, config: str) -> None:
    held = json.loads(fedprompt("partition", config, "partition.scheme=iid", "--json").out)["clients"]
    assert [client for client in held if "domains" in client] == []
    assert "[" not in fedprompt("partition", config, "partition.scheme=iid", "--show").out
