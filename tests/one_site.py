"""One site and what the server of its federation knows, for tests that speak to it order by order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from remote_run import exported, tiny_settings

from fedprompt.backbones.weight_cache import identity
from fedprompt.core.messages import LocalUpdate
from fedprompt.engines.remote.node import Site
from fedprompt.engines.remote.protocol import Answer, Order, Setting
from fedprompt.experiment import Experiment

NAMES = tuple(f"client_{place}" for place in range(4))
NOISE = {"noise": 1.0, "clip": 1e-3}


class Ground:
    """Files of four sites, and what the server of their federation knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = tiny_settings(folder / "runs", "ground", method={"name": "fedvpt", "prompt_tokens": 60})
        self.files = exported(self.settings, folder / "files")
        self.config = Experiment(self.settings).config.model_dump(mode="json", exclude={"engine", "output"})
        experiment = Experiment(self.settings)
        source, _, backbone, self.world = experiment.factory.prepare()
        self.setting = Setting("a" * 32, self.config, identity(backbone), source.class_names, NAMES)

    def order(self, config: dict[str, Any] | None = None, **changes: Any) -> Order:
        """Train in round 1, with settings of the run changed."""
        setting = replace(self.setting, config={**self.config, **(config or {})})
        return replace(Order("work", setting, 1, train=1, keep_as=5, received=self.world.roles.shared), **changes)

    def site(self, folder: Path, **options: Any) -> Site:
        return Site("client_1", str(self.files["client_1"]), folder / "client_1", **options)


def told(node: Any, order: Order) -> tuple[str, str]:
    """Why a node did not do what it was asked."""
    failure = Answer.from_bytes(node.answer(order.to_bytes())).failure
    assert failure is not None
    return failure


def reply(node: Any, order: Order) -> LocalUpdate:
    answer = Answer.from_bytes(node.answer(order.to_bytes()))
    found = answer.reply(10**7)
    assert found is not None, answer.failure
    return found
