"""The door where codec and cache meet: from the names of tasks to latents, made where missing.

    fields in `data/` -> codec in `runs/NAME/codec/TASK/model/` -> latents in `cache/KEY/`

Each of the three is found, or made by all ranks together, and each knows by fingerprint what it was
made from; what does not belong together is refused.
"""

import collections
import dataclasses
import functools
import itertools
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from ups.cache.store import Cache, build_cache
from ups.cache.windows import LatentWindows
from ups.config import UsageError
from ups.data.augment import moved, symmetries
from ups.data.check import check_said, uses
from ups.data.facts import Facts, from_plain
from ups.data.fields import Fields
from ups.data.find import open_data
from ups.files import refuse_links
from ups.memory import require_memory
from ups.models.codec import Codec, fit_patch, patch_sizes
from ups.models.latent_operator import TaskSpec, latest
from ups.models.recipe import patches, told
from ups.parent import inherit_codec
from ups.stages import load_codec
from ups.train.checkpoint import export_model
from ups.train.ranks import on_main
from ups.train.step import compile_in_graph

CHANGES = 64  # trajectories on which typical changes are measured
RESIDENT = 16e9  # bytes of latents that may lie on a GPU; more are memory-mapped


@dataclasses.dataclass
class TaskLatents:
    """One task of a run: its fields, the codec that belongs to them, and the cached latents."""

    facts: Facts
    codec: Codec
    fingerprint: str
    fields: Fields | None = None
    cache: Cache | None = None
    width: int = 0   # D of the run: the widest task's
    params: int = 0  # P of the run: the most parameters
    strides: tuple[int, ...] = (1,)  # frames that a step goes, in training
    history: int = 1  # frames that the operator sees
    plans: dict = dataclasses.field(default_factory=lambda: {1: []})  # as of choose_plan

    @property
    def name(self):
        return self.facts.name

    @functools.cached_property
    def spec(self):
        """What an operator must know of the task."""
        codec, facts, unit = self.codec, self.facts, 3 - len(self.facts.axes)  # leading axes of one
        inhomogeneous = tuple(unit + k for k, axis in enumerate(facts.axes)
                              if facts.periodic[k] and axis not in facts.shifts)
        change, dts = (), ()  # root mean square of a channel's change in a step of each stride
        if parent := codec.config.get("parent"):
            change, dts = parent["change"], parent["dts"]
        elif self.cache is not None:
            change = tuple(tuple(torch.stack([one.mean(0) for one in squares]).mean(0).sqrt()
                                 .tolist()) for squares in self._changes.values())
            dts = tuple(n * facts.dt for n in self.strides)
        return TaskSpec(self.name, (1,) * unit + codec.tokens, codec.width,
                        (True,) * unit + facts.periodic, facts.params, inhomogeneous,
                        self._conserved_directions(), change, dts, tuple(codec.weight.tolist()),
                        codec.inputs, self.history, facts.steady)

    @functools.cached_property
    def typical_change(self):
        """{stride: error of persistence}: norm of the change in a step / norm of the field, mean"""
        weight = self.codec.weight.double().cpu()
        return {stride: (torch.cat(squares) @ (weight / weight.sum())).sqrt().mean().item() or 1.0
                for stride, squares in self._changes.items()}

    @functools.cached_property
    def _changes(self):
        """{stride: mean square over the tokens of every change in a step, (T - stride, D) of each
        trajectory}"""
        found = {stride: [] for stride in self.strides}
        whole = itertools.chain.from_iterable(self.cache.z)  # over the shards
        for z in itertools.islice(whole, CHANGES):  # one at a time: some are large
            for stride, squares in found.items():
                change = z[stride:].float() - z[:-stride].float()
                squares.append(change.square().mean(1, dtype=torch.float64))
        return found

    def _conserved_directions(self):
        """The mean over space of a conserved channel, as the mean over tokens of w . z (+ const).

        Nothing for a learned codec, whose decoder is not linear.
        """
        codec = self.codec
        if not self.conserved or codec.config["kind"] != "patch":
            return ()
        z = torch.eye(codec.width + 1, codec.width, device=codec.weight.device)  # last: zero
        z = z[:, None].expand(-1, math.prod(codec.tokens), -1)
        means = codec.decode(z)[:, self.conserved].flatten(2).mean(2)  # (D + 1, C)
        return tuple(map(tuple, (means[:-1] - means[-1]).T.tolist()))

    @property
    def conserved(self):
        """Channels whose spatial mean the equation keeps."""
        return [self.facts.channels.index(name) for name in self.facts.conserved]

    @property
    def channel_weight(self):
        """What each latent channel counts in the norm of the field: (D,), zero in the padding."""
        return F.pad(self.codec.weight, (0, self.width - self.codec.width))

    @property
    def noise_scale(self):
        """Standard deviation (D,) in the latents of white noise of deviation 1 on the grid."""
        return F.pad(self.codec.weight.rsqrt(), (0, self.width - self.codec.width))

    def noise(self, z0, z1, batch):
        """What the step's random numbers add to z0 (B, N, D), or to all frames of a history
        (B, H, N, D): noise that is white on the grid.

        Its standard deviation is batch["level"] (B,) times the change z1 - z0 of the same sample: a
        mean change would drown a faint field. Its mean over the tokens is zero.
        """
        if "noise" not in batch:
            return 0.0
        return _noise(z0, z1, self.channel_weight, batch["level"], batch["noise"], self.noise_scale)

    def relative_error(self, z_hat, z):
        """|u_hat - u| / |u - mean| over space, read from latents (B, N, D): (B,)."""
        return _relative_error(z_hat, z, self.channel_weight)

    def augment(self, z, move, inputs=None):
        """Latents (B, T, N, D) of other solutions, and their input tokens (B, S, N, E) if any.

        `move` holds random numbers, see data/augment.py: (B, 3) of a shift, (B, 10) with those of
        mirrors and sums; None: nothing is moved. Patches break the translation symmetry of a
        periodic problem; shifts give it back. Mirrors and sums are for patches alone: a learned
        codec loses a little.
        """
        free, mirrors = symmetries(self.fields)
        rest = move is not None and move.shape[1] > 3 and self.codec.config["kind"] == "patch"
        if move is None or not free and not (rest and mirrors):
            return z, inputs
        mirror, added = move[:, 3:].split((3, 4), 1) if rest else (None, None)
        shift = move[:, :3]
        if inputs is not None:
            v = self.codec.decode_inputs(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])
            inputs = self.encode_inputs(
                moved(v, self.fields, shift, mirror, channels=self.facts.inputs))
        return self.encode(moved(self.decode(z), self.fields, shift, mirror, added)), inputs

    def encode(self, u):
        """Fields (.., C, *grid) as latents (.., N, D), zero-padded to the D of the run."""
        shape = u.shape[: -1 - len(self.codec.grid)]
        z = self.codec.encode(u.flatten(0, len(shape) - 1)).unflatten(0, shape)
        return F.pad(z, (0, self.width - z.shape[-1]))

    def decode(self, z):
        """Latents (.., N, D) as fields (.., C, *grid)."""
        z = z[..., : self.codec.width]
        return self.codec.decode(z.flatten(0, -3)).unflatten(0, z.shape[:-2])

    def encode_inputs(self, v):
        """Given channels (B, T, E, *grid) as tokens (B, T, N, E * points of a patch)."""
        return self.codec.encode_inputs(v.flatten(0, 1)).unflatten(0, v.shape[:2])

    def cond(self, indices):
        """Parameters of some trajectories as the operator wants them: (B, P), scaled."""
        return self.condition(self.fields.params(indices))

    def condition(self, params):
        """Raw parameters (B, p) scaled, and zero-padded to the P of the run."""
        cond = self.facts.condition(params)
        return F.pad(cond, (0, self.params - cond.shape[1]))

    def inputs(self, indices):
        """Tokens (B, T or 1, N, E) of the given channels of some trajectories; None without any."""
        v = self.fields.inputs(indices)
        if v is None:
            return None
        return self.encode_inputs(v.to(self.codec.weight.device))


@compile_in_graph
def _noise(z0, z1, weight, level, noise, scale):
    change = (weight * (z1 - latest(z0)) ** 2).sum(-1).mean(1) / weight.sum()
    level = (level * change.sqrt()).view(-1, *[1] * (z0.ndim - 1))
    return level * scale * (noise - noise.mean(-2, keepdim=True))


@compile_in_graph
def _relative_error(z_hat, z, weight):
    error, size = ((weight * x**2).sum((1, 2)) for x in (z_hat - z, z))
    return (error / size.clamp(min=1e-6) + 1e-12).sqrt()  # smooth where nothing changes


@dataclasses.dataclass
class Latents:
    """What a stage trains on."""

    tasks: list  # of TaskLatents
    windows: LatentWindows

    @property
    def specs(self):
        return [task.spec for task in self.tasks]

    @property
    def fingerprints(self):
        parents = [task.codec.config.get("parent") for task in self.tasks]
        return {f"codec of {task.name}": task.fingerprint for task in self.tasks} | {
            f"data of {task.name}": task.fields.digest for task in self.tasks} | {
            f"operator of {parent['run']}": parent["operator"] for parent in parents if parent}

    @property
    def about(self):
        """What a trained model's folder says of its data: all that its use needs."""
        return {"tasks": [dataclasses.asdict(spec) for spec in self.specs],
                "fields": [task.fields.facts.plain() for task in self.tasks]}


def open_latents(run, cfg, split, length=1, strides=(1,), history=1):
    """The tasks of `cfg`, and windows of their latents to train on: `length`, `strides`, `history`
    are those of LatentWindows. Every rank calls, and gets any failure."""
    strides = tuple(sorted({*strides}))
    if 1 not in strides:
        raise UsageError(f"--strides {' '.join(map(str, strides))}: 1 must be among them; to learn "
                         "from every n-th frame alone, use --stride_t n.")
    if history > 1 and strides != (1,):
        raise UsageError(f"--history {history}: frames of one distance are seen, so --strides is "
                         "1.")
    tasks, device = open_tasks(run.accelerator, cfg, split), run.accelerator.device
    for task in tasks:
        task.strides, task.history, last = strides, history, task.facts.frames - 1
        if max(history, strides[-1]) > last:
            raise UsageError(f"--strides {strides[-1]}, --history {history}: {task.name} has "
                             f"{last + 1} frames, so each is at most {last}.")
    windows = LatentWindows([task.cache for task in tasks], length, strides, history)
    if device.type == "cuda" and not cfg.workers:
        size = sum(z.nbytes for task in tasks for z in task.cache.z)
        if size < min(RESIDENT, torch.cuda.mem_get_info(device)[0] / 4):
            windows.move(device)
    return Latents(tasks, windows)


def open_tasks(accelerator, cfg, split=None):
    """Fields and codec of every data set of `cfg`, and, for a `split`, its cached latents."""
    tasks, found = [], on_main(accelerator, open_data, cfg, split == "train")  # which may make data
    names = [fields.facts.name for fields in found]
    if (known := getattr(cfg, "built_for", names)) != names:
        raise UsageError(f"--data holds {', '.join(names)}, and the operator of {cfg.run} was "
                         f"trained on {', '.join(known)}, in this order; leave --data out.")
    for fields in found:
        codec, mark = _codec(accelerator, cfg, fields)
        cache = split and build_cache(accelerator, codec, fields, split, root=cfg.cache,
                                      dtype=cfg.codec.dtype, fingerprint=mark)
        tasks.append(TaskLatents(fields.facts, codec, mark, fields, cache))
    if split == "train" and accelerator.is_main_process:
        model = getattr(cfg, "model", None)
        for task in tasks:
            facts = task.facts  # a learned codec is not linear, an own model may do less
            if task.codec.config["kind"] != "patch":
                facts = dataclasses.replace(facts, mirrors=(), linear=False, conserved=())
            if not hasattr(model, "body"):
                facts = dataclasses.replace(facts, conserved=())
            print(f"{task.name}: {uses(facts)}\n{task.name}: {told(task.codec, model)}")
    return _widened(tasks)


def load_tasks(operator, device):
    """{name: task} with the codecs that an operator (Loaded) was trained with, and no fields."""
    tasks = {}
    for name, facts in operator.facts.items():
        codec, mark = load_codec(operator.run, name, operator.config["lineage"])
        tasks[name] = TaskLatents(facts, codec.to(device), mark, plans=operator.plans(name),
                                  history=operator.history)
    _widened(tasks.values())
    return tasks


def _widened(tasks):
    for task in tasks:
        task.width = max(other.codec.width for other in tasks)
        task.params = max(len(other.facts.params) for other in tasks)
    return tasks


def _codec(accelerator, cfg, fields):
    """The codec of a data set in the folder of a run, and its fingerprint; made where it is not."""
    facts, how, init = fields.facts, cfg.codec, getattr(cfg, "init", "")
    size = 4 * len(facts.channels) * math.prod(facts.grid)  # bytes of a field
    on_main(accelerator, require_memory, 5 * size * facts.frames,
            f"{facts.name}: a trajectory with its roll-out",
            "keep less with --stride_x or --stride_t")
    folder = Path(cfg.run) / "codec" / facts.name / "model"
    asked = {"--codec.kind": how.kind, "--init": bool(init)}
    if how.kind == "patch":
        asked |= {"--codec.patch": how.patch, "--codec.components": how.components,
                  "--codec.error": how.error if how.components == "auto" else 0.0}
    on_main(accelerator, _make_codec, folder, cfg, fields, asked)
    codec, mark = load_codec(cfg.run, facts.name)
    made = codec.config["asked"] | {"--codec.kind": codec.config["kind"],
                                    "--init": "parent" in codec.config}
    if codec.config["data"] != fields.digest:
        raise UsageError(f"{folder} was made for other data than {fields.files[0].path}; give its "
                         "own file or folder by --data, or another --run.")
    if wrong := [flag for flag in asked if made.get(flag) != asked[flag]]:
        old, new = (", ".join(f"{flag} {values.get(flag)}" for flag in wrong)
                    for values in (made, asked))
        raise UsageError(f"{folder} was made with {old}, and now {new} is asked for; use the old "
                         "values, give another --run, or, where nothing has been trained with it, "
                         "remove it.")
    fields.facts = dataclasses.replace(  # the scales of the parameters: a parent's, if it has one
        facts, scales=from_plain(codec.config["facts"]).scales)
    return codec.to(accelerator.device), mark


def _make_codec(folder, cfg, fields, asked):
    """Fit the patch codec, or take over the one of --init; a learned one has a script."""
    facts, how = fields.facts, cfg.codec
    if (folder / "config.json").exists():
        return
    if how.kind != "patch" and not asked["--init"]:
        where = f"--data {' '.join(cfg.data)} " * bool(cfg.data)
        raise UsageError(f"{folder}: there is no learned codec yet; train it first with "
                         f"`accelerate launch train_codec.py --run {cfg.run} {where}--tasks "
                         f"{facts.name}`, or use --codec.kind patch.")
    check_said(fields)
    refuse_links(folder, cfg.run)
    if asked["--init"]:
        inherit_codec(cfg, folder, fields)
        return
    components = int(how.components) if how.components.isdecimal() else how.components
    wanted = (how.patch,) * len(facts.grid) if how.patch else patches(facts.grid)
    try:
        sizes = patch_sizes(facts.grid, wanted)
        codec = fit_patch(lambda: fields.stream(fields.split("train")),
                          lambda: fields.stream(fields.split("val")),
                          inputs=lambda: fields.stream(fields.split("train"), inputs=True),
                          facts=facts.plain(), patch=sizes, components=components,
                          error=asked["--codec.error"], offset=0.5 / cfg.stride_x)
    except ValueError as error:
        raise UsageError(f"{fields.files[0].path}, --codec.patch {how.patch} --codec.components "
                         f"{components}: {error}") from None
    if sizes != wanted:
        grid, fit, best = (" x ".join(map(str, one)) for one in (facts.grid, sizes, wanted))
        print(f"{facts.name}: patches of {fit} points fit the grid of {grid}, those of {best} do "
              "not; smaller ones cost time and memory, and multiples of 4 points avoid that.")
    for split in ("fit", "test"):  # NaN there must not come to light after the training
        collections.deque(fields.stream(fields.split(split)), maxlen=0)
    export_model(folder, codec.state_dict(),
                 codec.config | {"asked": asked, "data": fields.digest})
