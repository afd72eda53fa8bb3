"""Run a job in this process and print the FLOPs of all its matrix products, those inside of fused attention included."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from vit_step import attention_flops

from fedprompt.experiment import Experiment
from fedprompt.federation.observer import Observer

torch.set_num_threads(1)
counter = FlopCounterMode(display=False, custom_mapping=attention_flops())
with counter:
    Experiment.from_file(Path(sys.argv[1])).run(observer=Observer()).close()
print(json.dumps({"flops": counter.get_total_flops()}))
