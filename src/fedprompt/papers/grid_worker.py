"""The program of one of several processes that share a grid: `python -m fedprompt.papers.grid_worker REQUEST PLACE OF`.

REQUEST is JSON. Process PLACE of OF begins with its share of the runs, and goes on with what the others have not begun: a run
that another process writes is locked. What fails is left to the command that started it, which says why. It ends when its
work is done, or when standard input closes: then that command is gone.
"""

from __future__ import annotations

import json
import os
import sys
from threading import Thread

from fedprompt.config import Config
from fedprompt.errors import FedpromptError, StorageError
from fedprompt.papers import collect


def main(request: str, place: str, of: str) -> int:
    from fedprompt.experiment import Experiment

    Thread(target=_end_with_parent, daemon=True).start()
    wanted = collect.Request.of_json(json.loads(request))
    configs = [one_thread(config) for config in wanted.configs()]
    shares = [configs[(int(place) + offset) % int(of) :: int(of)] for offset in range(int(of))]
    for config in (each for share in shares for each in share):
        try:
            if not collect.is_finished(config):
                Experiment(config).run(resume=True).close()
        except StorageError as error:
            return error.exit_code
        except FedpromptError:
            continue
    return 0


def one_thread(config: Config) -> Config:
    return config.model_copy(update={"output": config.output.model_copy(update={"threads": 1})})


def _end_with_parent() -> None:
    while os.read(0, 1024):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
