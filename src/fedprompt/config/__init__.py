"""Settings of an experiment: models, files, overrides, sweeps and strict YAML. Free of torch."""

from fedprompt.config.complaints import complaints, difference
from fedprompt.config.protection_settings import (
    PRIVACY_PRESETS,
    AggregationConfig,
    AttackConfig,
    GuardConfig,
    PrivacyConfig,
)
from fedprompt.config.setting_types import Section
from fedprompt.config.settings import (
    NO_RESULT,
    BackboneConfig,
    Config,
    DataConfig,
    EngineConfig,
    FederationConfig,
    OutputConfig,
    PartitionConfig,
    TrainConfig,
    TunedConfig,
    parse,
)

__all__ = [
    "NO_RESULT",
    "PRIVACY_PRESETS",
    "AggregationConfig",
    "AttackConfig",
    "BackboneConfig",
    "Config",
    "DataConfig",
    "EngineConfig",
    "FederationConfig",
    "GuardConfig",
    "OutputConfig",
    "PartitionConfig",
    "PrivacyConfig",
    "Section",
    "TrainConfig",
    "TunedConfig",
    "complaints",
    "difference",
    "parse",
]
