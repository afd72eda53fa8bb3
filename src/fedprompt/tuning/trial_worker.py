"""The program of one of several processes that share a study: `python -m fedprompt.tuning.trial_worker DIRECTORY STAGE`.

It ends when its work is done, or when standard input closes: then the process that started it is gone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Thread

from fedprompt.errors import FedpromptError
from fedprompt.io.safe_text import safe_text
from fedprompt.tuning.plan import Plan
from fedprompt.tuning.study import work


def main(directory: str, stage: str) -> int:
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(Plan.load(Path(directory)), int(stage), threads=1, say=_say)
    except FedpromptError as error:
        _say(f"error: {error}")
        return error.exit_code
    return 0


def _say(text: str) -> None:
    print(safe_text(text), file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    while os.read(0, 1024):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
