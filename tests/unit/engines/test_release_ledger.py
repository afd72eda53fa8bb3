"""One release in a round: the same answer to the same question, and none to another."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from fedprompt.engines.remote.release_ledger import KEPT, Entry, Ledger, question
from fedprompt.errors import RunError, StorageError

pytestmark = pytest.mark.unit

START = {"prompt": torch.ones(2, 3)}
OWN = {"head": torch.zeros(4)}


def entry(number: int) -> Entry:
    return Entry(bytes([number]) * 5, {"head": torch.full((4,), float(number))})


def test_the_same_question_has_the_same_answer(tmp_path: Path) -> None:
    asked = question("work", START, OWN)
    Ledger(tmp_path).note(1, asked, entry(1))
    again = Ledger(tmp_path).answered(1, asked)
    assert again is not None
    assert again.packed == entry(1).packed
    assert torch.equal(again.state["head"], entry(1).state["head"])


def test_another_question_for_an_answered_round_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path).note(1, question("work", START, OWN), entry(1))
    with pytest.raises(RunError, match="answered already"):
        Ledger(tmp_path).answered(1, question("work", {"prompt": torch.zeros(2, 3)}, OWN))


def test_a_later_round_is_new_and_an_earlier_one_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.note(3, question("work", START, OWN), entry(1))
    assert ledger.answered(4, question("work", START, OWN)) is None
    with pytest.raises(RunError, match="round 2"):
        ledger.answered(2, question("work", START, OWN))


def test_a_killed_server_can_have_its_last_two_rounds_again_and_nothing_of_long_ago(tmp_path: Path) -> None:
    ledger, asked = Ledger(tmp_path), question("work", START, OWN)
    for round in range(1, 6):
        ledger.note(round, asked, entry(round))
    for round in (4, 5):
        again = ledger.answered(round, asked)
        assert again is not None
        assert again.packed == entry(round).packed
    with pytest.raises(RunError, match="round 2"):
        ledger.answered(5 - KEPT, asked)


def test_what_is_asked_is_the_kind_what_was_received_and_what_was_kept() -> None:
    asked = {
        question("work", START, OWN),
        question("survey", START, OWN),
        question("work", OWN, START),
        question("work", START, None),
        question("work", {**START, **OWN}, None),
    }
    assert len(asked) == 5
    assert question("work", {"prompt": torch.ones(2, 3)}, {"head": torch.zeros(4)}) == question("work", START, OWN)


def test_files_are_for_their_owner_and_damage_is_told(tmp_path: Path) -> None:
    ledger, asked = Ledger(tmp_path / "sent"), question("work", START, OWN)
    ledger.note(1, asked, entry(1))
    assert stat.S_IMODE((tmp_path / "sent").stat().st_mode) == 0o700
    for file in (tmp_path / "sent").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (tmp_path / "sent" / "1.state").unlink()
    with pytest.raises(StorageError, match="round 1"):
        ledger.answered(1, asked)
