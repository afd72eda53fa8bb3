"""The thread in the background, and who goes first."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from fedprompt.data.cache.prefetch import WAITING, Background, Turns

pytestmark = pytest.mark.unit

SOON = 30  # seconds after which a test gives up


def held() -> tuple[Callable[[], None], threading.Event, threading.Event]:
    """A job that waits, what tells that it began, and what lets it end."""
    begun, go = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        assert go.wait(SOON)

    return job, begun, go


def test_jobs_are_done_in_order_by_one_thread_that_ends_with_them() -> None:
    background, done = Background(), []
    for round in range(2):
        job, begun, go = held()
        background.ask(job)
        assert begun.wait(SOON)
        for number in range(5):
            background.ask(lambda number=number: done.append((number, threading.current_thread())))  # type: ignore[misc]
        assert len(done) == 5 * round, "somebody else did it"
        go.set()
        background.wait()
    assert [number for number, _ in done] == [*range(5), *range(5)]
    assert all(thread.daemon and thread is not threading.main_thread() for _, thread in done)
    for _, thread in done:
        thread.join(SOON)
        assert not thread.is_alive()


def test_a_job_that_fails_stops_no_other() -> None:
    background, done = Background(), []

    def fail() -> None:
        raise ValueError("nobody hears this")

    background.ask(fail)
    background.ask(lambda: done.append(1))
    background.wait()
    assert done == [1]


def test_no_more_than_a_few_jobs_wait() -> None:
    background, done = Background(), []
    job, begun, go = held()
    assert background.ask(job)
    assert begun.wait(SOON)
    taken = [background.ask(lambda: done.append(1)) for _ in range(WAITING + 3)]
    assert taken == [True] * WAITING + [False] * 3
    go.set()
    background.wait()
    assert len(done) == WAITING


def test_a_process_ends_whatever_is_under_way() -> None:
    code = (
        "import time; from fedprompt.data.cache.prefetch import Background; Background().ask(lambda: time.sleep(600))"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert ended.returncode == 0


def test_turns_are_taken_one_at_a_time_also_after_an_error() -> None:
    turns, inside, most = Turns(), [], []

    def work(ahead: bool) -> None:
        for _ in range(50):
            with turns.turn(ahead):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    with pytest.raises(ValueError, match="within"), turns.turn():
        raise ValueError("within")
    threads = [threading.Thread(target=work, args=(ahead,)) for ahead in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert len(most) == 200
    assert set(most) == {1}


def test_who_works_ahead_lets_the_others_go_first() -> None:
    turns, order = Turns(), []
    started = threading.Barrier(3)

    def take(name: str, ahead: bool) -> None:
        started.wait(SOON)
        with turns.turn(ahead):
            order.append(name)

    threads = [threading.Thread(target=take, args=(name, name == "ahead")) for name in ("ahead", "now")]
    with turns.turn():
        for thread in threads:
            thread.start()
        started.wait(SOON)
        while turns.waiting < 1:  # until the one with precedence stands in line
            pass
    for thread in threads:
        thread.join(SOON)
    assert order == ["now", "ahead"]
