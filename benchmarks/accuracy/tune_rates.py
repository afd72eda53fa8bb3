"""Choose learning rates for every method of a config, with the same number of trials each, on a seed no table uses.

    python benchmarks/accuracy/tune_rates.py configs/results/pacs.yaml data.source=PATH/pacs.parquet --output rates.json

Four rates of what the method trains (a factor 4 apart, around the start value of its case in the config), then, at the best of them, two
other rates of the head (a third, and three times the one in the config); Head-Tune, which has only a head, gets six rates of it. The best
Average of the trials wins; a trial that diverges loses. With `--part i/n` only every n-th method is tuned, so that several processes can
share the work; each writes a file of its own. The runs go to `runs/tuning` and are resumed if the script is started again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedprompt.config import Config, config_files
from fedprompt.errors import DivergenceError
from fedprompt.experiment import Experiment

FACTORS = (0.25, 1.0, 4.0, 16.0)
HEAD_FACTORS = (1 / 3, 3.0)
HEAD_ONLY = (1 / 9, 1 / 3, 1.0, 3.0, 9.0, 27.0)


def tune(config: Config, log: list[dict[str, Any]]) -> dict[str, float]:
    """The best rates: `lr`, and one per pattern of `train.lrs`."""
    start = {"lr": config.train.lr, **config.train.lrs}
    if config.method["name"] == "head_tune":
        candidates = [{**start, "head.*": start["head.*"] * factor} for factor in HEAD_ONLY]
        return max(candidates, key=lambda rates: attempt(config, rates, log))
    others = [name for name in start if name != "head.*"]
    candidates = [{**start, **{name: start[name] * factor for name in others}} for factor in FACTORS]
    best = max(candidates, key=lambda rates: attempt(config, rates, log))
    candidates = [best, *({**best, "head.*": best["head.*"] * factor} for factor in HEAD_FACTORS)]
    return max(candidates, key=lambda rates: attempt(config, rates, log))


def attempt(config: Config, rates: dict[str, float], log: list[dict[str, Any]]) -> float:
    for entry in log:
        if entry["method"] == config.method and entry["rates"] == rates:
            return float(entry["average"])
    groups = {name: rate for name, rate in rates.items() if name != "lr"}
    name = "-".join([config.name, *(f"{rate:.3g}" for rate in rates.values())])
    trial = config.model_copy(
        update={"name": name, "train": config.train.model_copy(update={"lr": rates["lr"], "lrs": groups})}
    )
    try:
        run = Experiment(trial).run(resume=True)
        average = float(run.summary()["average"])
        run.close()
    except DivergenceError:
        average = 0.0
    log.append({"method": config.method, "rates": rates, "average": average})
    print(f"{config.label:16} {average:.4f}  {rates}", flush=True)
    return average


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    configs = config_files.load(
        arguments.config, ["output.directory=runs/tuning", *arguments.overrides], [arguments.seed]
    )
    log: list[dict[str, Any]] = []
    chosen = []
    for config in configs[part::parts]:
        rates = tune(config, log)
        chosen.append({"method": config.method, "rates": rates})
        found = {"config": str(arguments.config), "overrides": arguments.overrides, "seed": arguments.seed}
        arguments.output.write_text(json.dumps({**found, "chosen": chosen, "trials": log}, indent=1) + "\n")


if __name__ == "__main__":
    main()
