"""What a person sees while a run trains: a live panel on a terminal or in a notebook, else a line a round and every 15 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedprompt.config import Config
from fedprompt.core.first_step import FirstStep, described, odd_steps
from fedprompt.core.messages import COHORT, Failure, LocalUpdate
from fedprompt.evaluation.label_check import sentence, warning
from fedprompt.experiment.notebook_panel import NotebookPanel
from fedprompt.experiment.pace import Pace, as_time
from fedprompt.federation.observer import Observer
from fedprompt.io.safe_text import safe_line
from fedprompt.metrics.accuracy import final_title, mean_title
from fedprompt.runs.attendance import ABSENT, Coverage
from fedprompt.runs.store import RoundRecord

LINE_EVERY = 15.0  # seconds, inside a round, where there is no terminal
PANEL_EVERY = 0.2
WORTH_SAYING = 60.0  # seconds that a run must take for a line about it


@contextmanager
def fitting_progress() -> Iterator[Observer]:
    """Progress where a person watches, in a notebook or on a terminal; elsewhere nothing."""
    console = Console(stderr=True)
    if not (console.is_jupyter or console.is_terminal):
        yield Observer()
        return
    progress = LiveProgress(console)
    try:
        yield progress
    finally:
        progress.stop()


def is_interactive() -> bool:
    """Whether someone types what is run, in a notebook or at a prompt, and goes on typing after an interrupt."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


class LiveProgress(Observer):
    """Round, cohort, loss, Average, Worst Local and the time that is left."""

    def __init__(self, console: Console, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._console = console
        self._names: Sequence[str] = ()
        self._live: Live | NotebookPanel | None = None
        self._values: dict[str, str] = {}
        self._begin = self._shown = now()
        self._first = self._done = self._rounds = 0
        self._label = ""
        self._warming = False  # whether the first steps are shorter than others
        self._doing, self._clients, self._ready = "", 0, 0
        self._on = ""  # which images the figures of rounds are of, unless it is the test images
        self._pace = Pace(self._begin)
        self._expected = False  # whether the time of all rounds was said
        self._figures: Mapping[str, Any] = {}
        self._coverage: Coverage | None = None  # of the last evaluation

    def started(self, config: Config, client_names: Sequence[str], rounds_done: int) -> None:
        self._names = [safe_line(name) for name in client_names]
        self._label, self._rounds = safe_line(f"{config.label} · seed {config.seed}"), config.federation.rounds
        self._first = self._done = rounds_done
        self._warming = bool(config.train.warmup_epochs)
        self._on = " (validation)" if config.federation.evaluate_on == "validation" else ""
        self._begin = self._shown = self._now()
        again = f", resumed after round {rounds_done}" if rounds_done else ""
        self._console.print(Text.assemble((self._label, "bold"), f": {safe_line(config.run_name)}{again}"))
        if config.train.augmented:
            self._tell("  training images are augmented: their features are computed anew in every step")
        if self._console.is_terminal:
            self._live = Live(self._panel(), console=self._console, refresh_per_second=4, transient=True)
        elif self._console.is_jupyter:
            self._live = NotebookPanel(self._panel())
        if self._live is not None:
            self._live.start()

    def noted(self, sentence: str) -> None:
        self._tell(f"  {sentence}")

    def checked(self, check: Mapping[str, Any]) -> None:
        self._tell(f"  {sentence(check)}")
        message = warning(check)
        if message is not None:
            self._warn(message)

    def measured(self, steps: Mapping[str, FirstStep]) -> None:
        self._tell(f"  {described(steps)}")
        for text in odd_steps(steps, self._warming):
            self._warn(text)

    def warned(self, round: int, text: str) -> None:
        self._warn(f"round {round}: {text}")

    def _warn(self, text: str) -> None:
        self._console.print(Text.assemble("  ", ("WARNING", "bold"), f": {safe_line(text)}"), soft_wrap=True)

    def cohort(self, round: int, clients: Sequence[int]) -> None:
        names = [self._names[client] for client in clients]
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        self._show(round=f"{round}/{self._rounds}", cohort=shown, doing="training")
        self._turn("training", len(clients))

    def surveyed(self, done: int, of: int) -> None:
        if self._doing != "surveying":
            self._turn("surveying", of)
        self._ready = done
        self._moved(0.0)

    def stepped(self, doing: str, clients: int, share: float) -> None:
        if doing == self._doing == "training":
            self._moved(clients * share)
        elif doing != "training":
            self._sign_of_life(doing, clients, share)

    def trained(self, round: int, reply: LocalUpdate) -> None:
        self._ready += 1
        self._moved(0.0)
        self._show(
            doing=f"trained {self._who(reply.client)}",
            loss="-" if reply.loss is None else f"{reply.loss:.4f}",
        )

    def refused(self, round: int, failure: Failure) -> None:
        what = f"{failure.rule}: {failure.value}"
        word = "absent" if failure.rule in ABSENT else "refused"
        self._tell(f"  round {round}: {word} {self._who(failure.client)} ({what})")

    def untested(self, round: int, failure: Failure) -> None:
        self._tell(f"  round {round}: not tested {self._who(failure.client)} ({failure.rule}: {failure.value})")

    def _tell(self, line: str) -> None:
        """One line of text that came from elsewhere."""
        self._console.print(safe_line(line), highlight=False, markup=False, soft_wrap=True)

    def spent(self, round: int, epsilon: float) -> None:
        self._console.print(
            f"  the privacy budget is spent: epsilon {epsilon:.3f}, and round {round} would exceed privacy.max_epsilon",
            highlight=False,
        )

    def evaluated(self, round: int, done: int, of: int) -> None:
        self._coverage = Coverage(done, of)
        self._show(doing=f"evaluated {done}/{of} clients")

    def committed(self, record: RoundRecord) -> None:
        self._done = record.round
        self._doing, self._shown, self._expected = "", self._now(), True
        values = {"loss": "-" if record.loss is None else f"{record.loss:.4f}", "ETA": self._left()}
        if record.summary is not None:
            values[f"Average{self._on}"] = f"{100 * record.summary['average']:.2f} %"
            values[f"Worst Local{self._on}"] = f"{100 * record.summary['worst']:.2f} %{self._of_how_many()}"
        self._show(**values)
        if self._live is None:
            figures = "  ".join(f"{key} {value}" for key, value in values.items())
            line = f"  round {record.round}/{self._rounds}  cohort of {len(record.cohort)}  {figures}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def concluded(self, figures: Mapping[str, Any]) -> None:
        self._figures = figures

    def finished(self) -> None:
        self.stop()
        figures = "  ".join(f"{title} {100 * value:.2f} %" for title, value in _concluding(self._figures).items())
        figures = f"{figures}{self._of_how_many()}" if figures else "no round was evaluated"
        self._console.print(f"  done: {figures}{_images(self._figures)}", highlight=False, soft_wrap=True)

    def _of_how_many(self) -> str:
        """Beside figures where some clients could not be tested: how many were."""
        covered = self._coverage
        return "" if covered is None or covered.tested == covered.of else f" ({covered.sentence()})"

    def stop(self) -> None:
        """Give the terminal back, also when the run failed."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _who(self, client: int) -> str:
        """The name of a message's sender as stated in the message, not verified yet."""
        if client == COHORT:
            return "the cohort"
        return self._names[client] if 0 <= client < len(self._names) else f"client {client}"

    def _left(self) -> str:
        done = self._done - self._first
        return as_time((self._now() - self._begin) / max(1, done) * (self._rounds - self._done))

    def _turn(self, doing: str, clients: int) -> None:
        """The next part of a round begins."""
        self._doing, self._clients, self._ready = doing, clients, 0
        self._pace = Pace(self._now())

    def _moved(self, under_way: float) -> None:
        """The clients of this part are further: those that are ready, and the share of those under way."""
        now, share = self._now(), (self._ready + under_way) / max(1, self._clients)
        self._pace.reached(share, now)
        whole = self._pace.whole()
        if not self._expected and self._doing == "training" and whole is not None:
            self._expected = True
            total = whole * (self._rounds - self._done)
            if total >= WORTH_SAYING:
                self._tell(
                    f"  about {as_time(whole)} of training in a round, {as_time(total)} in "
                    f"{self._rounds - self._done} rounds; evaluations come on top"
                )
        left = "" if whole is None else f", about {as_time(whole * (1 - self._pace.share))} left"
        self._sign_of_life(self._doing, self._clients, self._pace.share, left)

    def _sign_of_life(self, doing: str, clients: int, share: float, left: str = "") -> None:
        if self._now() - self._shown < (LINE_EVERY if self._live is None else PANEL_EVERY):
            return
        self._shown = self._now()
        text = f"{doing} {clients} clients, {100 * share:.0f} % done{left}"
        self._show(doing=text)
        if self._live is None:
            where = "before round 1" if doing == "surveying" else f"round {self._done + 1}/{self._rounds}"
            self._tell(f"  {where}: {text}")

    def _show(self, **values: str) -> None:
        self._values.update(values)
        if self._live is not None:
            self._live.update(self._panel())

    def _panel(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row("", ProgressBar(total=self._rounds, completed=self._done, width=40))
        for key in ("round", "cohort", "doing", "loss", f"Average{self._on}", f"Worst Local{self._on}", "ETA"):
            table.add_row(Text(key, style="dim"), Text(self._values.get(key, "-")))
        return table


def _images(figures: Mapping[str, Any]) -> str:
    """Which images the figures are of, where rounds are evaluated on validation images."""
    if "images" not in figures:
        return ""
    return (
        "  (validation images)"
        if figures["images"] == "validation"
        else f"  (test images, round {figures['best_round']})"
    )


def _concluding(figures: Mapping[str, Any]) -> dict[str, float]:
    """The accuracies of a run as tables call them."""
    if not figures:
        return {}
    over, pairs = figures["evaluations"], (("average", "Average"), ("worst", "Worst Local"))
    means = {mean_title(title, over): figures[key] for key, title in pairs}
    return means if over == 1 else {**{final_title(title): figures[f"final_{key}"] for key, title in pairs}, **means}
