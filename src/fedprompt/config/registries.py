"""Where others can add to what settings may name, and how a setting is held against it. Free of torch.

Names of this package are listed here, so that a config is checked without importing what they stand for. Others are asked
only about a name that is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from fedprompt.config.complaints import UnknownName
from fedprompt.extensions import Registry

AGGREGATORS: Registry[Any] = Registry(
    "aggregation.rule",
    "fedprompt.aggregators",
    home="fedprompt.federation.aggregate",
    builtin=("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "clipped_mean"),
)
SOURCES: Registry[Any] = Registry(
    "data.format",
    "fedprompt.sources",
    home="fedprompt.data.sources.open",
    builtin=(
        "embedded",
        "groceries",
        "xrays",
        "tiny",
        "tiny-text",
        "folder",
        "domain_folder",
        "parquet",
        "csv",
        "cifar10",
        "cifar100",
        "hub",
    ),
    words=("auto",),
)
PARTITIONS: Registry[Any] = Registry(
    "partition.scheme",
    "fedprompt.partitions",
    home="fedprompt.data.partition.divide",
    builtin=("domains", "classes", "dirichlet", "dirichlet_in_domains", "disjoint", "label_subsets", "iid"),
    words=("manifest",),
)
BACKBONES: Registry[Any] = Registry(
    "backbone.name",
    "fedprompt.backbones",
    home="fedprompt.backbones.load",
    builtin=("dinov2-small", "mini", "b16", "minilm", "tiny", "tiny-clip", "tiny-bert"),
)
REMOTE_ENGINES = ("flower-simulation", "flower")  # clients keep their own tensors, elsewhere
ENGINES: Registry[Any] = Registry(
    "engine.kind",
    "fedprompt.engines",
    home="fedprompt.engines.kinds",
    builtin=("in-process",),
    words=REMOTE_ENGINES,
)
TRACKERS: Registry[Any] = Registry(
    "output.trackers",
    "fedprompt.trackers",
    home="fedprompt.experiment.trackers",
    builtin=("tensorboard", "mlflow", "wandb"),
)


@dataclass(frozen=True)
class In:
    """Marks a setting whose value is a name in a registry."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Names of this package are offered, others are allowed."""
        return {"anyOf": [{"enum": list(self.registry.fixed)}, {"type": "string"}]}

    def _known(self, value: str, info: ValidationInfo) -> str:
        if (info.context or {}).get("unchecked_names"):
            return value
        spelled = self.registry.spelled(value)
        if spelled is None:
            raise UnknownName(self.registry.rule(), self.registry.names())
        return spelled
