"""fedprompt: personalised federated prompt tuning of frozen vision transformers.

    from fedprompt import Experiment
    run = Experiment.from_file("configs/demo.yaml").run()
    print(run.summary()["average"])

Names are loaded on first use, so that `import fedprompt` stays free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedprompt import errors

if TYPE_CHECKING:
    from fedprompt.backbones import load_backbone
    from fedprompt.backbones.load import register_backbone
    from fedprompt.config import Config
    from fedprompt.core.messages import LocalUpdate
    from fedprompt.core.method import (
        Batch,
        Client,
        Combine,
        Method,
        Mixture,
        Progress,
        Prompts,
        Seen,
        Server,
        Stage,
        Upload,
        World,
    )
    from fedprompt.core.registry import register, register_variant
    from fedprompt.core.roles import Roles, Statistic
    from fedprompt.data.partition.divide import register_partition
    from fedprompt.data.partition.schemes import Supply
    from fedprompt.data.sources.base import Source
    from fedprompt.data.sources.open import register_source
    from fedprompt.engines.in_process import InProcess
    from fedprompt.engines.kinds import register_engine
    from fedprompt.experiment import Experiment
    from fedprompt.experiment.tracking import Tracked, Tracker, register_tracker
    from fedprompt.federation.aggregate import register_aggregator
    from fedprompt.federation.loop import Engine
    from fedprompt.federation.observer import Observer
    from fedprompt.inference.trained_client import TrainedClient
    from fedprompt.methods.bases.with_head import WithHead
    from fedprompt.methods.bases.with_local import WithLocal
    from fedprompt.methods.bases.with_text import WithText
    from fedprompt.modules.contexts import TextContext
    from fedprompt.modules.insertion import TokenPrompt
    from fedprompt.random_streams import Stream
    from fedprompt.report.in_notebook import compare, plot
    from fedprompt.runs.run import Run, load_run
    from fedprompt.tensors import Tensors

__version__ = "0.1.0"

_HOMES = {
    "Experiment": "experiment",
    "Config": "config",
    "Run": "runs.run",
    "load_run": "runs.run",
    "compare": "report.in_notebook",
    "plot": "report.in_notebook",
    "TrainedClient": "inference.trained_client",
    "Observer": "federation.observer",
    "Method": "core.method",
    "World": "core.method",
    "Roles": "core.roles",
    "Statistic": "core.roles",
    "Stream": "random_streams",
    "Batch": "core.method",
    "Prompts": "core.method",
    "TokenPrompt": "modules.insertion",
    "TextContext": "modules.contexts",
    "Seen": "core.method",
    "Stage": "core.method",
    "Client": "core.method",
    "Progress": "core.method",
    "Server": "core.method",
    "Upload": "core.method",
    "Combine": "core.method",
    "Mixture": "core.method",
    "WithHead": "methods.bases.with_head",
    "WithText": "methods.bases.with_text",
    "WithLocal": "methods.bases.with_local",
    "Tensors": "tensors",
    "LocalUpdate": "core.messages",
    "Source": "data.sources.base",
    "Supply": "data.partition.schemes",
    "Engine": "federation.loop",
    "InProcess": "engines.in_process",
    "load_backbone": "backbones",
    "register": "core.registry",
    "register_variant": "core.registry",
    "register_aggregator": "federation.aggregate",
    "register_source": "data.sources.open",
    "register_partition": "data.partition.divide",
    "register_backbone": "backbones.load",
    "register_engine": "engines.kinds",
    "register_tracker": "experiment.tracking",
    "Tracker": "experiment.tracking",
    "Tracked": "experiment.tracking",
}

__all__ = [
    "Batch",
    "Client",
    "Combine",
    "Config",
    "Engine",
    "Experiment",
    "InProcess",
    "LocalUpdate",
    "Method",
    "Mixture",
    "Observer",
    "Progress",
    "Prompts",
    "Roles",
    "Run",
    "Seen",
    "Server",
    "Source",
    "Stage",
    "Statistic",
    "Stream",
    "Supply",
    "Tensors",
    "TextContext",
    "TokenPrompt",
    "Tracked",
    "Tracker",
    "TrainedClient",
    "Upload",
    "WithHead",
    "WithLocal",
    "WithText",
    "World",
    "__version__",
    "compare",
    "errors",
    "load_backbone",
    "load_run",
    "plot",
    "register",
    "register_aggregator",
    "register_backbone",
    "register_engine",
    "register_partition",
    "register_source",
    "register_tracker",
    "register_variant",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fedprompt.{_HOMES[name]}"), name)
    if name == "VisionPrompt":
        raise AttributeError("fedprompt.VisionPrompt is called TokenPrompt now, and Prompts.vision is Prompts.tokens")
    raise AttributeError(f"module 'fedprompt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
