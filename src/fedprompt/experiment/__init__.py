"""The front door: `Experiment(config).run() -> Run`, in one process or over sites."""

from fedprompt.experiment.experiment import Experiment

__all__ = ["Experiment"]
