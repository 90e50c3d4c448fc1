"""The door where operator and cache meet: what the operator's own roll-outs leave to be corrected.

From every `start_every`-th frame of each trajectory the frozen operator rolls out to the end. Each
(start, lead) is an item of the data set: the states z0 and z1_hat after lead - 1 and lead steps,
and the true z1. The trajectories must be others than the operator trained on, or its errors look
smaller than they are. All of it is held in memory, on every rank: the fit split is small.
"""

import torch
from torch.utils.data import Dataset

from ups.models.generators import compression
from ups.models.precision import products

CHUNK = 64  # trajectories that are rolled out at a time


class Residuals(Dataset):
    def __init__(self, operator, windows, device, start_every):
        """`windows`: LatentWindows whose windows are whole trajectories."""
        self.dts = [cache.dt for cache in windows.caches]
        self.conds = [cond.cpu() for cond in windows.conds]
        self.tasks = [_roll_out(operator, windows, task, device, start_every)
                      for task in range(len(windows.sizes))]
        self.sizes = [len(truth) * len(lead) for truth, _, lead, *_ in self.tasks]

    def __len__(self):
        return sum(self.sizes)

    def __getitems__(self, triples):
        """A batch as of `LatentWindows`, of one step, with z (B, 3, N, D) = z0, z1_hat, z1 and
        lead (B,)."""
        steps, rows, pairs = zip(*triples, strict=True)
        task, items = pairs[0][0], torch.tensor([item for _, item in pairs])
        truth, states, lead, frame, place, inputs = self.tasks[task]
        n, item = items // len(lead), items % len(lead)
        before, after = states[n, place[item] - 1], states[n, place[item]]
        batch = {}
        if inputs is not None:  # one for all frames, or those at z0
            at = frame[item] - 1 if inputs.shape[1] > 1 else torch.zeros_like(item)
            batch["inputs"] = inputs[n, at][:, None]
        return batch | {
            "z": torch.stack([before, after, truth[n, frame[item]]], 1),
            "lead": lead[item],
            "dt": torch.full((len(rows),), self.dts[task]),
            "cond": self.conds[task][n],
            "task": task,
            "step": steps[0],
            "rows": torch.tensor(rows),
        }

    def compression(self, task):
        """Tables (3, leads, D) of how residuals are compressed at each lead."""
        truth, states, lead, frame, place, _ = self.tasks[task]
        r = (truth[:, frame] - states[:, place]).transpose(0, 1)  # (items, n, N, D)
        return compression(r.flatten(1, 2), lead)


@torch.no_grad()
@products("highest")
def _roll_out(operator, windows, task, device, start_every):
    """Truth (n, T, N, D), states (n, S, N, D), of each item its lead, frame and place in S, and the
    inputs (n, T or 1, N, E), if any."""
    truth, states = [], []
    for first in range(0, windows.sizes[task], CHUNK):
        some = range(first, min(first + CHUNK, windows.sizes[task]))
        batch = windows.__getitems__([(0, n, (task, n)) for n in some])
        z, dt, cond = (batch[key].to(device) for key in ("z", "dt", "cond"))
        starts, rolled = range(0, z.shape[1] - 1, start_every), []
        for s in starts:
            part = [z[:, s]]
            for k in range(s, z.shape[1] - 1):
                given = {"inputs": batch["inputs"][:, k].to(device)} if "inputs" in batch else {}
                part.append(operator(part[-1], dt, cond, task, **given))
            rolled.append(torch.stack(part, 1))
        truth.append(z.cpu())
        states.append(torch.cat(rolled, 1).cpu())
    inputs = windows.inputs[task]
    lead = torch.cat([torch.arange(part.shape[1]) for part in rolled])
    start = torch.cat([torch.full((part.shape[1],), s)
                       for s, part in zip(starts, rolled, strict=True)])
    place = lead.nonzero()[:, 0]  # lead 0 is the true start itself
    return (torch.cat(truth), torch.cat(states), lead[place], (start + lead)[place], place,
            inputs if inputs is None else inputs.cpu())
