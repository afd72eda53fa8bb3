"""The one adapter to Flower: nothing outside this package imports it, and importing it keeps Flower and Ray from phoning home."""

import os
from importlib.util import find_spec

from fedprompt.errors import ConfigError

SILENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # as Ray asks for, at length, where it is not set
}  # the environment of every program of Flower's
os.environ.update(SILENT)

if find_spec("flwr") is None:
    raise ConfigError("engine.kind must be in-process where Flower is not installed: pip install 'fedprompt[flower]'")
