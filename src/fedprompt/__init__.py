"""fedprompt: personalised federated prompt tuning of frozen vision transformers.

    from fedprompt import Experiment
    run = Experiment.from_file("configs/demo.yaml").run()
    print(run.summary()["average"])

Names are loaded on first use, so that `import fedprompt` stays free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedprompt.config import Config
    from fedprompt.experiment import Experiment
    from fedprompt.method import Batch, Method, Prompts, Seen, Stage, World
    from fedprompt.registry import register, register_variant
    from fedprompt.roles import Roles, Statistic, Tensors
    from fedprompt.run import Run
    from fedprompt.using.client import TrainedClient

__version__ = "0.1.0"

_HOMES = {
    "Experiment": "experiment",
    "Config": "config",
    "Run": "run",
    "TrainedClient": "using.client",
    "Method": "method",
    "World": "method",
    "Batch": "method",
    "Prompts": "method",
    "Seen": "method",
    "Stage": "method",
    "Roles": "roles",
    "Statistic": "roles",
    "Tensors": "roles",
    "register": "registry",
    "register_variant": "registry",
}

__all__ = [
    "Batch",
    "Config",
    "Experiment",
    "Method",
    "Prompts",
    "Roles",
    "Run",
    "Seen",
    "Stage",
    "Statistic",
    "Tensors",
    "TrainedClient",
    "World",
    "__version__",
    "register",
    "register_variant",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fedprompt.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedprompt' has no attribute {name!r}")
