"""tests/faults/faulty.py where what the ranks say is read a step late, as on GPUs."""

from types import SimpleNamespace

import faulty
import torch

from ups.train import ranks, run


class Late(ranks.Agreement):
    def __init__(self, *given):
        super().__init__(*given)
        self.late, self.copy = True, torch.empty(self.world)
        self.arrived = SimpleNamespace(record=lambda: None, query=lambda: True)


if __name__ == "__main__":
    run.Agreement = Late
    faulty.command(faulty.main)
