"""What a site has given away is counted before it is given, over all runs, and survives whatever ends the node."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("dp_accounting")

from fedprompt.engines.remote.privacy_ledger import FILE, PrivacyLedger
from fedprompt.engines.remote.site_policy import SitePolicy
from fedprompt.errors import StorageError
from fedprompt.privacy.accounting import Plan, epsilon

pytestmark = pytest.mark.unit

A, B = "a" * 32, "b" * 32


def ledger(folder: Path, **policy: float) -> PrivacyLedger:
    return PrivacyLedger(folder, SitePolicy.model_validate({"evaluate": "noised", **policy}))


def test_releases_of_a_run_are_composed_and_runs_are_added_up(tmp_path: Path) -> None:
    for round in (0, 1, 2):
        assert ledger(tmp_path).charge_update(A, round, 2.0) is None
    assert ledger(tmp_path).charge_update(B, 1, 4.0) is None
    expected = epsilon(2.0, 1e-6, Plan("client", 3)) + epsilon(4.0, 1e-6, Plan("client", 1))
    assert ledger(tmp_path).total() == (pytest.approx(expected), pytest.approx(2e-6))


def test_a_round_is_counted_once(tmp_path: Path) -> None:
    """A node that was killed after it counted and before it answered counts no second time."""
    for _ in range(3):
        ledger(tmp_path).charge_update(A, 1, 2.0)
    assert ledger(tmp_path).runs()[A].releases == 1
    for _ in range(3):
        ledger(tmp_path).charge_evaluation(A, 1, 0.5)
    assert ledger(tmp_path).runs()[A].evaluation_epsilon == 0.5


def test_every_round_is_counted_whatever_order_they_come_in(tmp_path: Path) -> None:
    """The last round is counted first, and its answer fails: the rounds before it are not free."""
    for round in (9, 1, 2, 3, 9):
        ledger(tmp_path).charge_update(A, round, 2.0)
        ledger(tmp_path).charge_evaluation(A, round, 0.5)
    found = ledger(tmp_path).runs()[A]
    assert (found.releases, found.evaluations, found.evaluation_epsilon) == (4, 4, 2.0)


def test_nothing_is_released_beyond_the_budget_whatever_the_run_is_called(tmp_path: Path) -> None:
    one = epsilon(2.0, 1e-6, Plan("client", 1))
    most = {"total_epsilon": 2.5 * one}
    assert ledger(tmp_path, **most).charge_update(A, 1, 2.0) is None
    assert ledger(tmp_path, **most).charge_update(B, 1, 2.0) is None
    for run in ("c" * 32, "d" * 32):
        told = ledger(tmp_path, **most).charge_update(run, 1, 2.0)
        assert told is not None
        assert "total_epsilon" in told
        assert run not in ledger(tmp_path).runs(), "what was refused is not counted"


def test_evaluations_and_deltas_are_part_of_the_budget(tmp_path: Path) -> None:
    most = {"total_epsilon": 1.0, "run_delta": 1e-5, "total_delta": 2e-5}
    assert ledger(tmp_path, **most).charge_evaluation(A, 1, 0.6) is None
    assert ledger(tmp_path, **most).charge_evaluation(A, 2, 0.6) is not None
    wide = {"total_epsilon": 1e6, "run_delta": 1e-5, "total_delta": 2e-5}
    assert [ledger(tmp_path / "x", **wide).charge_update(run * 32, 1, 2.0) is None for run in "abc"] == [
        True,
        True,
        False,
    ]


def test_a_weaker_noise_under_the_same_number_would_cost_what_it_is_worth(tmp_path: Path) -> None:
    ledger(tmp_path).charge_update(A, 1, 4.0)
    ledger(tmp_path).charge_update(A, 2, 1.0)
    assert ledger(tmp_path).total()[0] == pytest.approx(epsilon(1.0, 1e-6, Plan("client", 2)))


def test_a_killed_node_has_counted_what_it_was_about_to_give(tmp_path: Path) -> None:
    """`kill -9` in the middle of endless charges: the file is whole, and every charge that came back is in it."""
    code = (
        "import sys; from pathlib import Path\n"
        "from fedprompt.engines.remote.privacy_ledger import PrivacyLedger\n"
        "from fedprompt.engines.remote.site_policy import SitePolicy\n"
        "ledger = PrivacyLedger(Path(sys.argv[1]), SitePolicy())\n"
        "for round in range(1, 10**6):\n"
        "    ledger.charge_update('a' * 32, round, 2.0)\n"
        "    print(round, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(40)]
    os.kill(process.pid, signal.SIGKILL)
    said += [int(line) for line in process.stdout.read().split()]
    process.wait()
    process.stdout.close()
    counted = ledger(tmp_path).runs()[A]
    assert counted.releases == counted.last >= said[-1]


def test_the_file_is_for_its_owner_and_damage_is_no_fresh_start(tmp_path: Path) -> None:
    ledger(tmp_path).charge_update(A, 1, 2.0)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    for damage in (
        "",
        "{}",
        '{"format": "x", "runs": {}}',
        '{"format": "fedprompt-privacy-ledger-1", "runs": {"a": {"x": 1}}}',
    ):
        (tmp_path / FILE).write_text(damage)
        with pytest.raises(StorageError, match="cannot be read"):
            ledger(tmp_path).charge_update(A, 2, 2.0)
