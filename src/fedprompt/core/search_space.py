"""What may be tried for a setting: a range of numbers, or some values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedprompt.errors import ConfigError, broken

Plain = bool | int | float | str | None


@dataclass(frozen=True)
class FloatRange:
    """Numbers from `low` to `high`, uniform in the logarithm unless `log` is false."""

    low: float
    high: float
    log: bool = True

    def __post_init__(self) -> None:
        finite = all(math.isfinite(number) for number in (self.low, self.high))
        if not finite or not self.low < self.high or (self.log and self.low <= 0):
            rule = "have a finite low below high, and a low above 0 where log is true"
            raise ConfigError(broken("a range", rule, {"low": self.low, "high": self.high, "log": self.log}))

    def holds(self, value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high


@dataclass(frozen=True)
class Choice:
    """One of these values."""

    values: tuple[Plain, ...]

    def __post_init__(self) -> None:
        plain = all(value is None or isinstance(value, bool | int | float | str) for value in self.values)
        if not self.values or not plain or len({repr(value) for value in self.values}) < len(self.values):
            raise ConfigError(broken("a choice", "be some different plain values", list(self.values)))

    def holds(self, value: object) -> bool:
        return any(value == each and type(value) is type(each) for each in self.values)


SearchSpace = Mapping[str, FloatRange | Choice]
"""By setting, such as `train.lrs.head.*` or `method.kl_weight`."""
