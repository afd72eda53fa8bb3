"""A run in bfloat16 on a processor that is slower at it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import run

import fedprompt.experiment.experiment as front_door
from fedprompt.backbones.random_weights import random_vit
from fedprompt.config import BackboneConfig
from fedprompt.experiment.precision_check import autocast_note, seconds
from fedprompt.federation.observer import Observer

pytestmark = pytest.mark.unit

SHORT = BackboneConfig(name="tiny", autocast=True)


def clock(*times: float) -> Callable[[Callable[[], object]], float]:
    """Products in bfloat16 and in float32 in turn."""
    given = iter(times * 5)

    def timed(work: Callable[[], object]) -> float:
        work()
        return next(given)

    return timed


def test_what_is_slower_is_said_with_its_factor() -> None:
    found = autocast_note(SHORT, random_vit(), clock(3.0, 1.0))
    assert found is not None
    assert "3.0 times as long in bfloat16 as in float32" in found


def test_what_is_faster_or_not_asked_for_is_not_mentioned() -> None:
    assert autocast_note(SHORT, random_vit(), clock(1.0, 2.0)) is None
    assert autocast_note(SHORT, random_vit(), clock(1.0, 1.0)) is None
    assert autocast_note(BackboneConfig(name="tiny"), random_vit(), clock(3.0, 1.0)) is None


def test_time_is_that_of_the_work() -> None:
    assert 0 <= seconds(lambda: None) < seconds(lambda: sum(range(300_000)))


def test_a_run_tells_it(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Notes(Observer):
        def __init__(self) -> None:
            self.said: list[str] = []

        def noted(self, sentence: str) -> None:
            self.said.append(sentence)

    monkeypatch.setattr(
        front_door, "autocast_note", lambda config, backbone: autocast_note(config, backbone, clock(2.0, 1.0))
    )
    notes = Notes()
    run(settings(backbone={"name": "tiny", "autocast": True}, federation={"rounds": 1}), observer=notes)
    assert any("2.0 times as long" in sentence for sentence in notes.said)
