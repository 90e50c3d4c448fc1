"""tests/faults/faulty.py where what the ranks say is read a step late, as on GPUs."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))

import faulty

from ups.train import ranks, run


class Late(ranks.Agreement):
    def __init__(self, *given):
        super().__init__(*given)
        self.late, self.copy = True, torch.empty(self.world)
        self.arrived = SimpleNamespace(record=lambda: None, query=lambda: True)


if __name__ == "__main__":
    run.Agreement = Late
    faulty.command(faulty.main)
