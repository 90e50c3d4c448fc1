"""Generators: the next state as a distribution. A member is a trajectory: every draw is fed back.

    step(z, dt, cond, task, noise, inputs) -> z1     noise (B, numbers(task)): normal numbers

    Ensemble    the operator with noise in its modulations and its tokens, in one call
    Diffusion   the operator's step and what it misses, drawn along the probability flow in `calls`
                calls (Karras et al. 2022), or by its consistency student in one or two
    Perturbed   no network of its own: the operator, from a start with white noise

What a step misses, r = z1 - z1_hat, has white coordinates x, N(0, 1) in every direction:

    r = size colour(x)       log size = a + b log |z1_hat - z0|,  fitted by least squares
    colour: r^_k = L_k x^_k  for each wave vector k over the tokens, L_k L_k* the mean of r^_k r^_k*

The size follows the change where errors do, and not (b = 0) where the equation itself has noise.
Waves around closed axes are those of a circle: there the covariance is a rough one, to begin with.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from ups.models.body import TokenBody
from ups.models.diffusion import angles, few_step, multistep
from ups.models.latent_operator import ConserveMean, LatentOperator, latest

NUMBERS = 32  # of a member's noise vector (FGN: Alet et al. 2025)
LADDER = angles(8)  # along which a teacher is distilled
JUMPS = (0, 3)  # places in it of the student's first and second call
MEASURED, CHUNK = 2048, 256  # steps of which residuals are measured, and of these at a time
FLOOR = 1e-8  # least variance of a direction, as a share of the largest


class ResidualLaw(nn.Module):
    """What a step misses, r (B, N, D) of a task's own width, from white x and back."""

    def __init__(self, tasks):
        super().__init__()
        self.tasks = tuple(tasks)
        for index, task in enumerate(self.tasks):
            waves = *task.tokens[:2], task.tokens[2] // 2 + 1
            weight = torch.tensor(task.weight or (1.0,) * task.width)
            self.register_buffer(f"weight{index}", weight / weight.sum())
            self.register_buffer(f"law{index}", torch.zeros(4))  # a, b, least |change|, most |r|
            for name in ("root", "inverse"):  # (X, Y, Z/2 + 1, D, D), real and imaginary parts
                self.register_buffer(f"{name}{index}",
                                     torch.zeros(*waves, task.width, task.width, 2))

    def norm(self, r, task):
        """Root mean square (B,) of the field's error that r (B, N, D) is."""
        weight = self.get_buffer(f"weight{task}")
        return (weight * r[..., :len(weight)].square()).sum(-1).mean(1).sqrt()

    def size(self, change, task):
        """The typical size (B, 1, 1) of r after a change z1_hat - z0 (B, N, D)."""
        a, b, least, most = self.get_buffer(f"law{task}")
        size = torch.exp(a + b * self.norm(change, task).maximum(least).log())
        return size.minimum(most)[:, None, None]

    def colour(self, x, task, name="root"):
        """White x (B, N, D) -> a stationary field with the residuals' covariance and size 1."""
        tokens, root = self.tasks[task].tokens, self.get_buffer(f"{name}{task}")
        waves = torch.fft.rfftn(x.to(root.dtype).unflatten(1, tokens), dim=(1, 2, 3))
        waves = torch.einsum("xyzij,bxyzj->bxyzi", torch.view_as_complex(root), waves)
        return torch.fft.irfftn(waves, s=tokens, dim=(1, 2, 3)).flatten(1, 3)

    def waves(self, z, task):
        """Waves of z (B, N, D) over the tokens, (B, X, Y, Z/2 + 1, D, 2), each divided by the root
        of the residuals' deviation in it: half whitened, so that faint ones count, and drown none.
        """
        tokens, root = self.tasks[task].tokens, self.get_buffer(f"root{task}")
        z = z[..., :root.shape[-2]].to(root.dtype).unflatten(1, tokens)
        waves = math.sqrt(2) * torch.fft.rfftn(z, dim=(1, 2, 3), norm="ortho")
        return torch.view_as_real(waves / root.square().sum((-2, -1)) ** 0.25)

    def residual(self, x, change, task):
        """r (B, N, D) of x, nowhere larger than residuals were seen to be: it is fed back."""
        r, most = self.size(change, task) * self.colour(x, task), self.get_buffer(f"law{task}")[3]
        return r * (most / self.norm(r, task).clamp(min=1e-30)).clamp(max=1)[:, None, None]

    def whiten(self, r, change, task):
        """The white coordinates of r, the inverse of size * colour(x)."""
        return self.colour(r / self.size(change, task), task, "inverse")

    def energy(self, x, task):
        """The mean square (B,) of an error x in white coordinates, and that of the field's error
        that it is, in equal shares: small scales are many, large ones are what counts."""
        return (x.square().mean((1, 2)) + self.norm(self.colour(x, task), task).square()) / 2

    @torch.no_grad()
    def measure(self, operator, windows):
        """Fit the law of each task to an operator's steps from true states; `windows` are those of
        a split. Returns the root mean square of r of each task."""
        found, device = [], self.weight0.device
        for index, task in enumerate(self.tasks):
            pairs, count = [], windows.sizes[index]
            chosen = range(0, count, -(-count // MEASURED))
            for first in range(0, len(chosen), CHUNK):
                batch = windows.__getitems__([(0, 0, (index, n))
                                              for n in chosen[first : first + CHUNK]])
                z = batch["z"].to(device)
                z0, z1 = z[:, :-1].squeeze(1), z[:, -1]
                dt, cond = batch["dt"].to(device), batch["cond"].to(device)
                given = {"inputs": batch["inputs"][:, 0].to(device)} if "inputs" in batch else {}
                z1_hat = operator(z0, dt, cond, index, **given)
                pairs.append([x[..., :task.width]
                              for x in (z1_hat - latest(z0), z1 - z1_hat)])
            found.append(self.fit(index, pairs))
        return found

    @torch.no_grad()
    def fit(self, task, pairs):
        """From a list of (change, r), each (B, N, D) of the task's own width; sums in float64.

        Returns the root mean square of r.
        """
        logs = torch.cat([torch.stack([self.norm(x, task).double().clamp(min=1e-12).log()
                                       for x in pair], 1) for pair in pairs])
        variance, mean = torch.cov(logs.T, correction=0), logs.mean(0)
        b = (variance[0, 1] / (variance[0, 0] + 1e-3)).clamp(0, 2)  # no slope from no variation
        least, most = logs[:, 0].min().exp(), logs[:, 1].max().exp()
        self.get_buffer(f"law{task}").copy_(torch.stack([mean[1] - b * mean[0], b, least, most]))
        total, count, scale = 0, 0, 0
        for change, r in pairs:
            r = (r / self.size(change, task)).double().unflatten(1, self.tasks[task].tokens)
            waves = torch.fft.rfftn(r, dim=(1, 2, 3), norm="ortho")
            total = total + torch.einsum("bxyzi,bxyzj->xyzij", waves, waves.conj())
            scale = scale + self.norm(r.flatten(1, 3), task).square().sum()
            count += len(r)
        self.get_buffer(f"law{task}")[0] += (scale / count).log() / 2  # colour has size 1
        values, vectors = torch.linalg.eigh((total / scale).cpu())
        values = values.clamp(min=FLOOR * values.max().item()).sqrt()
        for name, part in (("root", values), ("inverse", 1 / values)):
            root = (vectors * part[..., None, :]) @ vectors.mH
            self.get_buffer(f"{name}{task}").copy_(torch.view_as_real(root))
        return logs[:, 1].mul(2).exp().mean().sqrt().item()


class Ensemble(LatentOperator):
    """z1 = operator(z0; noise) + size gain colour(x): with the noise at zero before training it is
    the operator, bit for bit, and with noise the operator and a residual of the right covariance.

    A vector of normal numbers is added to all modulations, by a small MLP without biases; the
    coloured field enters the first layer too, so that the step carries it along.
    """

    perturbation = None  # of each task's first state, in deviations of a field; None: none
    strength = None      # of each task's noise in a step; None: 1

    def __init__(self, config, tasks):
        super().__init__(config, tasks)
        self.law, dim = ResidualLaw(self.tasks), config.dim
        self.vector = nn.Sequential(nn.Linear(NUMBERS, dim, bias=False), nn.SiLU(),
                                    nn.Linear(dim, 6 * config.depth * dim, bias=False))
        self.field = nn.ModuleList(nn.Linear(task.width, dim, bias=False) for task in self.tasks)
        for p in (self.vector[2].weight, *self.field.parameters()):
            nn.init.normal_(p, std=1e-2 / math.sqrt(dim))
        self.gain = nn.ParameterList(torch.ones(task.width) for task in self.tasks)

    def forward(self, z0, dt, cond, task=0, inputs=None, vector=None, field=None):
        """z0 (B, N, D) or, with a history, (B, H, N, D), dt (B,), cond (B, P), vector (B, 32), a
        coloured field (B, N, D of the task) -> a draw of z1 (B, N, D); without noise z1_hat."""
        if vector is None:
            return super().forward(z0, dt, cond, task, inputs)
        more = self.vector(vector)[:, None, None, None].chunk(6 * len(self.body.blocks), -1)
        modulation = [[m + part for m, part in zip(block, more[6 * i:6 * i + 6], strict=True)]
                      for i, block in enumerate(self.modulate(dt, cond, task))]
        z1 = super().forward(z0, dt, cond, task, inputs, modulation, self.field[task](field))
        size = self.law.size((z1 - latest(z0)).detach(), task)
        r = size * self.conserve(self.gain[task] * field, task)
        return z1 + F.pad(r, (0, self.width - r.shape[-1]))

    def numbers(self, task):
        """How many normal numbers a step of a member takes."""
        return NUMBERS + math.prod(self.tasks[task].tokens) * self.tasks[task].width

    def shaped(self, noise, task):
        """The vector and the coloured field that normal numbers (B, numbers) are."""
        vector, x = noise[:, :NUMBERS], noise[:, NUMBERS:]
        return vector, self.law.colour(x.unflatten(1, (-1, self.tasks[task].width)), task)

    def step(self, z, dt, cond, task, noise, inputs=None):
        noise = noise * (self.strength[task] if self.strength else 1.0)
        return self(z, dt, cond, task, inputs, *self.shaped(noise, task))


class Denoiser(nn.Module):
    """net(x, c_noise | context, dt, cond): a `TokenBody` reads the noisy tokens and their context,
    joined by channel. Zero at the start, so that draws are white noise, and in the padding.

        diffusion   [noisy residual, z0, z1_hat]    channels = 3
        steady      [noisy residual]                channels = 1
    """

    def __init__(self, config, tasks, channels):
        super().__init__()
        self.tasks = tuple(tasks)
        self.width = max(task.width for task in self.tasks)
        self.body = TokenBody(config, self.tasks, inputs=channels * self.width,
                              outputs=self.width, scalars=2)

    def forward(self, x, c_noise, context, dt, cond, task=0, inputs=None):
        """x (B, N, D), c_noise (B,), context [(B, N, D), ..], dt (B,), cond (B, P) -> (B, N, D)"""
        width = self.tasks[task].width
        x = torch.cat([self._valid(x, width), *context], -1)
        scalars = torch.stack([torch.log10(dt), c_noise], -1)
        return self._valid(self.body(x, scalars, cond, task, inputs), width)

    def _valid(self, x, width):
        """Zero in the padding: what noise there is must neither be read nor be answered."""
        return F.pad(x[..., :width], (0, self.width - width))


class Diffusion(nn.Module):
    """net(x, c_noise | z0, z1_hat, ..) on white coordinates x of what the operator's step misses.

    Teacher and student are this one class and may exchange weights; `kind` says how to draw. Before
    training, and with 0 calls, x is white itself: a yardstick. The operator is a stage of its own.
    """

    perturbation = strength = None

    def __init__(self, config, tasks, operator, kind="diffusion", calls=8):
        super().__init__()
        self.operator, self.kind, self.calls = (operator,), kind, calls  # no part of this model
        self.net = Denoiser(config, tasks, channels=3)
        self.law, self.conserve = ResidualLaw(tasks), ConserveMean(tasks)

    @property
    def hidden(self):
        """The layers whose matrices are Muon's."""
        return self.net.body.hidden

    def forward(self, x, c_noise, z0, z1_hat, dt, cond, task=0, inputs=None):
        """x (B, N, D of the task), z0, z1_hat (B, N, D) -> like x"""
        return self.net(x, c_noise, [z0, z1_hat], dt, cond, task, inputs)[..., :x.shape[-1]]

    def numbers(self, task):
        """How many normal numbers a step of a member takes."""
        spec = self.law.tasks[task]
        return math.prod(spec.tokens) * spec.width * (2 if self.kind == "consistency" else 1)

    @torch.no_grad()
    def step(self, z, dt, cond, task, noise, inputs=None):
        spec, z1_hat = self.law.tasks[task], self.operator[0](z, dt, cond, task, inputs)
        noise = noise.unflatten(1, (-1, math.prod(spec.tokens), spec.width))
        net = functools.partial(self, z0=latest(z), z1_hat=z1_hat, dt=dt, cond=cond, task=task,
                                inputs=inputs)
        if self.kind == "consistency":
            x = few_step(net, noise[:, 0], LADDER[list(JUMPS[:self.calls])], lambda i: noise[:, i])
        else:
            x = multistep(net, noise[:, 0], angles(self.calls))
        r = self.conserve(self.law.residual(x, z1_hat - latest(z), task), task)
        r = r * (self.strength[task] if self.strength else 1.0)
        return z1_hat + F.pad(r, (0, z.shape[-1] - spec.width))


class Perturbed:
    """The operator, from first states with white noise, of so many deviations by task."""

    def __init__(self, operator, perturbation):
        self.operator, self.perturbation = operator, perturbation

    def numbers(self, task):
        return 0

    def step(self, z, dt, cond, task, noise, inputs=None):
        return self.operator(z, dt, cond, task, inputs)


def fair_crps(z, z1, task, law, index):
    """CRPS (B,) of members z (B, M, N, D) against z1 (B, N, D), of the fields and of waves of the
    latents, in units of the field's norm; of one member, absolute errors.

    Fair (Ferro 2014), so that the spread is right for any number of members. Points hardly tell
    which scales vary, and left to them small scales fill with noise; waves do (FourCastNet 3,
    Bonev et al. 2025), and are half of the whole where the noise is that of the equation. The more
    an error follows the change in a step, the more it matters where it is, and the fewer they are.
    """
    z = torch.cat([z, z1[:, None]], 1)
    std = getattr(task.codec, "full", task.codec).std
    fields = task.decode(z).flatten(3) / std[:, None]  # (B, M + 1, C, points)
    waves = law.waves(z.flatten(0, 1), index).unflatten(0, z.shape[:2])
    share = (1 - law.get_buffer(f"law{index}")[1]).clamp(0, 1) / 2
    size = law.norm(z1, index).clamp(min=1e-3)
    return torch.lerp(_fair_crps(fields), _fair_crps(waves), share) / size


def _fair_crps(u):
    """Of members and, last, the truth (B, M + 1, ..): (B,), the mean over what follows."""
    x, y, count = u[:, :-1], u[:, -1:], u.shape[1] - 1
    apart = (x[:, None] - x[:, :, None]).abs().flatten(1).mean(1)  # of members with themselves too
    return (x - y).abs().flatten(1).mean(1) - count / max(1, count - 1) / 2 * apart
