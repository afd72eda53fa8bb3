"""What methods recommend for their training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedprompt.client.optimizers import round_factor, schedule_of
from fedprompt.config import TrainConfig
from fedprompt.core.recipe import PLAIN_SGD, resolve
from fedprompt.core.registry import methods
from fedprompt.methods.bases.with_head import WithHead
from fedprompt.methods.head_tune import HeadTune

pytestmark = pytest.mark.unit

WITH_HEAD = {name: cls for name, cls in methods().items() if issubclass(cls, WithHead)}


@pytest.mark.parametrize("name", sorted(WITH_HEAD))
def test_a_method_with_a_head_is_trained_as_head_tune_is_unless_its_rule_needs_plain_sgd(name: str) -> None:
    expected = PLAIN_SGD if name == "per_fedavg" else HeadTune().recipe
    if name == "pep_fedpt":  # the prompts of a class are trained by few images
        expected = replace(expected, lrs={"class_prompts": 0.06})
    assert WITH_HEAD[name]().recipe == expected


def test_the_recommended_rate_falls_to_the_half_in_the_middle_of_a_run() -> None:
    found = resolve(TrainConfig(), HeadTune().recipe)
    rates = [round_factor(schedule_of(found, "head.weight"), number, 10) for number in (1, 6)]
    assert rates == pytest.approx([1.0, 0.5])
