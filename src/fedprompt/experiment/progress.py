"""What a person sees while a run trains: a live panel on a terminal, one line a round elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedprompt.config import Config
from fedprompt.core.messages import COHORT, Failure, LocalUpdate
from fedprompt.evaluation.label_check import sentence, warning
from fedprompt.federation.loop import Observer
from fedprompt.io.safe_text import safe_line
from fedprompt.runs.store import RoundRecord


class LiveProgress(Observer):
    """Round, cohort, loss, Average, Worst Local and the time that is left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._names: Sequence[str] = ()
        self._live: Live | None = None
        self._values: dict[str, str] = {}
        self._begin = time.perf_counter()
        self._first = self._done = self._rounds = 0
        self._label = ""

    def started(self, config: Config, client_names: Sequence[str], rounds_done: int) -> None:
        self._names = [safe_line(name) for name in client_names]
        self._label, self._rounds = safe_line(f"{config.label} · seed {config.seed}"), config.federation.rounds
        self._first = self._done = rounds_done
        self._begin = time.perf_counter()
        again = f", resumed after round {rounds_done}" if rounds_done else ""
        self._console.print(Text.assemble((self._label, "bold"), f": {safe_line(config.run_name)}{again}"))
        if config.train.augmented:
            self._tell("  training images are augmented: their features are computed anew in every step")
        if self._console.is_terminal:
            self._live = Live(self._panel(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def checked(self, check: Mapping[str, Any]) -> None:
        self._tell(f"  {sentence(check)}")
        message = warning(check)
        if message is not None:
            self._console.print(Text.assemble("  ", ("WARNING", "bold"), f": {safe_line(message)}"), soft_wrap=True)

    def cohort(self, round: int, clients: Sequence[int]) -> None:
        names = [self._names[client] for client in clients]
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        self._show(round=f"{round}/{self._rounds}", cohort=shown, doing="training")

    def trained(self, round: int, reply: LocalUpdate) -> None:
        self._show(
            doing=f"trained {self._who(reply.client)}",
            loss="-" if reply.loss is None else f"{reply.loss:.4f}",
        )

    def refused(self, round: int, failure: Failure) -> None:
        self._tell(f"  round {round}: refused {self._who(failure.client)} ({failure.rule}: {failure.value})")

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
        self._show(doing=f"evaluated {done}/{of} clients")

    def committed(self, record: RoundRecord) -> None:
        self._done = record.round
        values = {"loss": "-" if record.loss is None else f"{record.loss:.4f}", "ETA": self._left()}
        if record.summary is not None:
            values["Average"] = f"{100 * record.summary['average']:.2f} %"
            values["Worst Local"] = f"{100 * record.summary['worst']:.2f} %"
        self._show(**values)
        if self._live is None:
            figures = "  ".join(f"{key} {value}" for key, value in values.items())
            line = f"  round {record.round}/{self._rounds}  cohort of {len(record.cohort)}  {figures}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def finished(self) -> None:
        self.stop()
        figures = "  ".join(f"{key} {self._values[key]}" for key in ("Average", "Worst Local") if key in self._values)
        self._console.print(f"  done: {figures or 'all rounds were there already'}", highlight=False)

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
        seconds = (time.perf_counter() - self._begin) / max(1, done) * (self._rounds - self._done)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d}"

    def _show(self, **values: str) -> None:
        self._values.update(values)
        if self._live is not None:
            self._live.update(self._panel())

    def _panel(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row("", ProgressBar(total=self._rounds, completed=self._done, width=40))
        for key in ("round", "cohort", "doing", "loss", "Average", "Worst Local", "ETA"):
            table.add_row(Text(key, style="dim"), Text(self._values.get(key, "-")))
        return table
