"""The only adapter to Flower: nothing else imports Flower. Importing this package turns off the telemetry of Flower and Ray."""

import os
from importlib.util import find_spec

from fedprompt.errors import ConfigError

SILENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray prints a long warning
}  # the environment of every Flower program
os.environ.update(SILENT)

if find_spec("flwr") is None:
    raise ConfigError("engine.kind must be in-process if Flower is not installed: pip install 'fedprompt[flower]'")
