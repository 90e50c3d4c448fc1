"""Small stand-ins: fields that are a formula, a codec that is a matrix, a launch of one process."""

import math
import time

import torch
from factual import facts


class OneRank:
    """What `build_cache` asks of an accelerator, for one process."""

    device, is_main_process, process_index, num_processes = torch.device("cpu"), True, 0, 1


class FormulaFields:
    """u(t, c, x) = (c + 1) sin(x + index) exp(-nu t), 40 trajectories, nu = 0.01 * (index + 1)."""

    def __init__(self, task="burgers1d", grid=16, frames=9, channels=1, params=("nu",), pause=0.0):
        self.facts = facts(task, (grid,), tuple("uvw"[:channels]), frames, 0.05, params)
        self.digest, self.stride_x, self.frames = "d" * 64, 1, range(frames)
        self.pause, self.reads = pause, 0

    def __len__(self):
        return 40

    def read(self, indices):
        nu = 0.01 * (indices + 1)
        t, x = torch.arange(self.facts.frames), torch.linspace(0, 2 * math.pi, self.facts.grid[0])
        wave = torch.sin(x + indices[:, None].float())[:, None, None, :]
        decay = torch.exp(-nu[:, None] * t)[:, :, None, None]
        scale = torch.arange(1, len(self.facts.channels) + 1)[:, None]
        return (wave * decay * scale).float()  # (n, T, C, grid)

    def stream(self, indices):
        for part in indices.split(3):
            time.sleep(self.pause)
            self.reads += 1
            yield self.read(part).flatten(0, 1)

    def params(self, indices):
        nu = 0.01 * (indices.double() + 1)
        return torch.stack([nu * 10**k for k in range(len(self.facts.params))], 1)

    def split(self, name):
        return {"train": torch.arange(0, 30), "fit": torch.arange(0), "val": torch.arange(30, 35),
                "test": torch.arange(35, 40)}[name]


class MatrixCodec(torch.nn.Module):
    """Patches of four points times a (4 C, width) matrix with orthonormal columns."""

    def __init__(self, grid=16, channels=1, width=3, task="burgers1d"):
        super().__init__()
        self.tokens, self.width = (grid // 4,), width
        generator = torch.Generator().manual_seed(width)
        basis = torch.linalg.qr(torch.randn(4 * channels, 4 * channels, generator=generator))[0]
        self.register_buffer("basis", basis[:, :width].contiguous())
        self.register_buffer("weight", torch.linspace(1.5, 0.5, width))

    def encode(self, u):
        x = u.unflatten(2, (-1, 4)).movedim(2, 1).flatten(2)  # (B, N, 4 C)
        return x @ self.basis

    def decode(self, z):
        x = (z @ self.basis.mT).unflatten(2, (-1, 4))  # (B, N, C, 4)
        return x.movedim(1, 2).flatten(2)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
