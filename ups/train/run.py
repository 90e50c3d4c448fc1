"""A run of one stage: its Accelerator, the plumbing of the loop, signals and the end.

    with Run(cfg, "operator") as run:
        loader = run.loader(data)
        ...
        run.resume(model, optimizer, ema, backward, built_on=data.fingerprints)
        for batch in run.progress(loader):
            ...

The folder `runs/NAME/STAGE` belongs to one launch at a time. It holds `config.json`,
`metrics.jsonl`, `checkpoints/`, and, written last, `exit.json` with the true end: done, failed,
stopped or out_of_memory.
"""

import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from torch.utils.data import DataLoader, default_convert
from tqdm import tqdm

from ups.cache.sampler import StepSampler
from ups.config import RunError, Stopped, UsageError, check, flat
from ups.data.find import names_of, refuse_other_data
from ups.files import write_json
from ups.memory import require_memory
from ups.models.layers import compiled
from ups.train import checkpoint, dry_run, folder
from ups.train.checkpoint import export_model, write_checkpoint
from ups.train.ranks import (
    ALARM,
    MEMORY,
    Agreement,
    PeerFailed,
    everyone,
    make_accelerator,
    on_main,
)
from ups.train.step import CudaGraphed, check_step, is_out_of_memory, random_state
from ups.train.tracking import Metrics, WandB

BEGAN = time.monotonic() - time.process_time()  # about when the process did
REPEATS = 5  # seconds in which one more signal is the same request
COUNTS = ("log_every eval_every save_every keep timeout steps batch_size patch stride_x "
          "stride_t strides history length val_trajectories")
LIMITS = dict.fromkeys(COUNTS.split(), (1, math.inf)) | {  # in every stage that has such a field
    "micro_batch": (0, math.inf), "workers": (0, math.inf), "minutes": (0, math.inf),
    "lr": (1e-12, math.inf), "weight_decay": (0, 1), "warmup": (0, math.inf), "ema": (0, 0.99999),
    "grad_clip": (1e-9, math.inf), "noise": (0, 10), "noise_end": (0, 10), "sigma_mean": (-20, 20),
    "sigma_std": (1e-3, 20), "draws": (1, 64), "members": (2, 65536), "seed": (0, 2**31)}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The flags of every stage. They may change when a run resumes: systems, not science."""

    # data
    data: tuple[str, ...] = ()   # files or folders with fields; empty: data/, made when absent
    tasks: tuple[str, ...] = ()  # which data sets of --data, as burgers1d:nu=0.01,0.1; empty: all
    axes: str = ""               # of an array whose file does not name them: "sample time x y"
    facts: str = ""              # YAML file with what is true of the data: docs/data.md
    # run
    run: str = ""                # folder of the run; empty: runs/ and the names of the data sets
    cache: str = "cache"         # folder of the latents; made when absent
    recompute: bool = False      # compute activations of a block again: less memory, more time
    micro_batch: int = 0         # rows that a process computes at a time, to save memory; 0: all
    workers: int = 0             # processes of each rank that load data; 0: the rank itself does
    compile: bool = False        # compile the model; on a GPU also replay steps as CUDA graphs
    log_every: int = 50          # steps between two lines of training metrics
    eval_every: int = 500        # steps between two validations
    save_every: int = 500        # steps between two checkpoints
    keep: int = 2                # checkpoints to keep, the newest
    minutes: float = 0.0         # that all may take, test included: sets --steps; 0: no limit
    timeout: int = 600           # seconds after which a silent process is named and all end
    wandb: str = ""              # Weights & Biases project to log to; empty: none
    dry_run: bool = False        # take a few steps and say what the run needs, on N GPUs too

    def __post_init__(self):
        if getattr(self, "init", ""):
            from ups.parent import adopt  # it reads runs

            adopt(self)
        check(self, **{name: LIMITS[name] for name in vars(self) if name in LIMITS})
        if not self.run:
            object.__setattr__(self, "run", f"runs/{'+'.join(names_of(self))}")


class Run:
    def __init__(self, cfg, stage):
        self.cfg, self.stage = cfg, stage
        self.folder = Path(cfg.run) / (f"{stage}.dry_run" if cfg.dry_run else stage)
        self.step = 0                # optimizer steps taken
        self.seconds = 0.0           # that earlier launches took for them
        self.stop_requested = False  # on this rank, by a signal
        self.stopping = False        # on every rank, agreed in `Backward`
        self.trial = False           # the last steps are taken to time them: ups/train/dry_run.py
        self.started, self.handlers = False, {}
        self.last_saved = self.lock = self.wandb = self.sampler = self.task = self.backward = None
        self.metrics = Metrics(self.folder / "metrics.jsonl")
        self.accelerator = make_accelerator(cfg.timeout)
        size, world = cfg.batch_size, self.accelerator.num_processes
        if size % world:
            near = " or ".join(str(n * world) for n in (size // world, size // world + 1) if n)
            raise UsageError(f"--batch_size {size} is not divisible by {world} processes; "
                             f"the nearest that are: {near}.")
        torch.manual_seed(cfg.seed)  # the same weights on every rank
        sharded = self.accelerator.distributed_type == DistributedType.FSDP
        self.graphs = cfg.compile and self.accelerator.device.type == "cuda" and not sharded
        self.agree = Agreement(self.accelerator, cfg.timeout)
        self.agree.listen(self.end_at_once)
        self.previous = on_main(self.accelerator, folder.take, self, vars(RunConfig()).keys())
        if cfg.minutes:
            object.__setattr__(cfg, "steps", self.previous.get("steps", cfg.steps))
        self.finished = self.previous.get("status") == "done"
        if self.finished and (cfg.data or cfg.tasks):
            on_main(self.accelerator, refuse_other_data, cfg)

    # ---- before the loop

    def loader(self, data):
        """A DataLoader whose global batch k is a function of (seed, k) alone.

        `data`, or its `windows`, is a data set as docs/template.md says under "Data".
        """
        windows, cfg = getattr(data, "windows", data), self.cfg
        here = getattr(windows, "device", None)  # where latents lie that are few enough for a GPU
        pin = self.accelerator.device.type == "cuda" and (here is None or here.type == "cpu")
        if self.accelerator.device.type == "cpu":
            on_main(self.accelerator, self._require_memory, windows)
        self.sampler = StepSampler(windows.sizes, cfg.batch_size, cfg.steps, cfg.seed)
        return DataLoader(windows, batch_sampler=self.sampler, collate_fn=default_convert,
                          num_workers=cfg.workers, pin_memory=pin)

    def _require_memory(self, windows):
        """Refuse a batch that cannot fit, with its noise, its moved copy and the result."""
        row, size = windows.__getitems__([(0, 0, (0, 0))]), self.cfg.batch_size
        need = 4 * size * sum(value.nbytes for value in row.values() if torch.is_tensor(value))
        share = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / self.accelerator.num_processes
        require_memory(share * need, f"a batch of {size} rows", "lower --batch_size")

    def compile(self, model):
        """With --compile, `model` compiled in place, one variant per task and shape; with
        --recompute, its blocks keep no activations."""
        for module in model.modules():
            if hasattr(module, "recompute"):
                module.recompute = self.cfg.recompute
        if self.cfg.compile:
            tasks = len(self.sampler.sizes) if self.sampler else 1
            torch._dynamo.config.recompile_limit = 8 + 4 * tasks  # more of them is an error
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            compiled(model)
        return model

    def replay(self, function):
        """With --compile on a GPU, `function` as CUDA graphs: one for each task of a batch, and
        for each value of its arguments. Elsewhere, or under FSDP, it runs as it reads."""
        graphed = CudaGraphed(lambda task, *args: function(*args), self.graphs)
        return lambda *args: graphed(self.task, *args)

    def resume(self, model, optimizer, ema, backward, *, built_on):
        """Load the newest sound checkpoint, if any; the loader goes on where it ended.

        `built_on` names what the stage is built on by fingerprint; another one is refused.
        """
        self.parts = dict(model=model, optimizer=optimizer.optimizer, ema=ema)
        self.backward, self.built_on, given = backward, built_on, self.cfg.micro_batch
        if self.previous.get("status") == "out_of_memory":
            half = max(1, self.previous["micro_batch"] // 2)
            backward.micro_batch, backward.splits = min(given or half, half), 1
        newest = on_main(self.accelerator, self._newest)
        if newest is None:
            return
        tensors, state = checkpoint.read_checkpoint(newest)
        for name, mark in built_on.items():
            if state["lineage"].get(name) != mark:
                raise UsageError(f"{self.folder} was trained on another {name}; "
                                 "put it back, or give another --run.")
        checkpoint.restore_state(self.accelerator, tensors, state["optimizer"], **self.parts)
        ema.updates.fill_(state["ema_updates"])
        ema.best_score = math.inf if state["best_score"] is None else state["best_score"]
        known = state["micro_batch"]
        if known and given == state["config"]["micro_batch"]:  # a larger one ran out of memory
            backward.micro_batch = min(backward.micro_batch or known, known)
        backward.splits += state["oom_splits"]
        self.step = self.sampler.start = self.last_saved = state["step"]
        self.seconds = state["seconds"]

    def _newest(self):
        """The newest checkpoint that is sound; the record is cut back to it (main process)."""
        for found in checkpoint.checkpoints(self.folder / "checkpoints"):
            fault = checkpoint.damage(found)
            if fault is None:
                self.metrics.cut(checkpoint.step_of(found))
                print(f"resuming from {found}")
                return found
            print(f"{found} is damaged ({fault}); going on from before it.", file=sys.stderr)
        self.metrics.cut(0)
        return None

    # ---- the loop

    def progress(self, loader):
        """The batches from here to the last step, with a progress bar; ends early when stopping."""
        cfg, main = self.cfg, self.accelerator.is_main_process
        if self.backward is None:
            raise UsageError("call run.resume(model, optimizer, ema, backward, built_on=..) before "
                             "run.progress(loader).")
        self.started, self.begun = True, time.monotonic() - self.seconds  # as one launch
        self._catch_signals()
        if cfg.dry_run:
            dry_run.report(self, *(yield from dry_run.measure(self, self._steps(loader))))
        if cfg.minutes and self.last_saved is None:
            with dry_run.undone(self):
                seconds = yield from dry_run.measure(self, self._steps(loader))
            dry_run.fit_minutes(self, *seconds, time.monotonic() - BEGAN)
        if main and cfg.wandb:
            self.wandb = WandB(cfg.wandb, self.folder, flat(cfg), [self.stage])
        if main and not self.finished:
            rows = cfg.batch_size // self.accelerator.num_processes
            folder.begin(self.folder, flat(cfg), self.backward.micro_batch or rows)
        yield from self._steps(loader)
        if any(everyone(self.accelerator, self.stop_requested)):  # in the last validation or save
            self._stop()
        self._release_signals()

    def _steps(self, loader):
        show = self.accelerator.is_main_process
        with tqdm(total=self.cfg.steps, initial=self.step, disable=not show, unit="step",
                  desc=self.stage, dynamic_ncols=True, smoothing=0.05,
                  mininterval=0.5 if sys.stderr.isatty() else 20) as self.bar:
            for batch in loader:
                self.step, self.task = batch["step"] + 1, batch.get("task")
                first = not self.backward.checked
                before = random_state() if first else None
                yield batch
                if first:
                    check_step(self, before)
                self.bar.update()
                if self.stopping:
                    self._stop()

    def _stop(self):
        if self.last_saved == self.step:
            raise Stopped(f"stopped by a signal at step {self.step}; run the same command again to "
                          "go on.")
        raise RunError(f"stopped by a signal at step {self.step}, but its checkpoint could not be "
                       f"written ({self._saved()}).")

    def every(self, steps):
        """True at each multiple of `steps` and at the last step."""
        due = self.step % steps == 0 or self.step == self.cfg.steps
        if due:  # nothing is logged, judged or saved of a step in which a rank failed
            self.backward.settle()
        return due

    def log(self, values):
        """Record metrics of this step; a loss that is not finite ends the run on every rank."""
        values = {key: float(value) for key, value in values.items()}
        loss = values.get("train/loss")
        if loss is not None:
            self._check_finite(loss)
            self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            if self.backward.splits:
                values["train/oom_splits"] = self.backward.splits
        if not self.accelerator.is_main_process:
            return
        if loss is None and not self.trial:
            shown = "  ".join(f"{key} {value:.4g}" for key, value in values.items())
            self.bar.write(f"step {self.step}: {shown}")
        self.metrics.write(self.step, values)
        if self.wandb:
            self.wandb.log(self.step, values)

    def _check_finite(self, value, name="loss"):
        if not math.isfinite(value):
            raise FloatingPointError(f"the {name} is {value} at step {self.step} "
                                     f"({self._saved()}); lower --lr, or run `python -m ups.data "
                                     "validate` on the data.")

    def end_at_once(self, sentence):
        """The end, from another thread: this process waits in a collective and cannot be asked."""
        if self.started:
            self._end("failed", f"rank {self.accelerator.process_index}: {sentence}", code=1)
        print(f"\nerror: {sentence}", file=sys.stderr, flush=True)  # below the progress bar
        os.kill(os.getpid(), ALARM)

    def _saved(self):
        last = self.last_saved
        return "no checkpoint yet" if last is None else f"the last checkpoint is step {last}"

    def save(self):
        """Write a checkpoint; a full disk is reported and training goes on. Every rank calls."""
        self.backward.settle()
        self._check_finite(float(self.backward.mean))
        alone = contextlib.nullcontext()
        with self.agree.waiting() if self.backward.sharded else alone:
            tensors = checkpoint.gather_state(self.accelerator, **self.parts)
        if on_main(self.accelerator, self._write, tensors):
            self.last_saved = self.step

    def _write(self, tensors):
        self._check_finite(sum(float(t.sum()) for t in tensors.values()), "sum of all weights")
        if os.fstat(self.lock.fileno()).st_nlink == 0:
            raise RunError(f"{self.folder} was removed while it trained; run the same command "
                           "again to begin anew.")
        ema, splits = self.parts["ema"], self.backward.splits
        state = {"step": self.step, "lineage": self.built_on, "config": flat(self.cfg),
                 "optimizer": self.parts["optimizer"].state_dict()["param_groups"],
                 "ema_updates": float(ema.updates), "seconds": time.monotonic() - self.begun,
                 "best_score": ema.best_score if math.isfinite(ema.best_score) else None,
                 "micro_batch": self.backward.micro_batch if splits else 0, "oom_splits": splits}
        try:
            write_checkpoint(self.folder / "checkpoints", self.step, tensors, state, self.cfg.keep)
        except (OSError, SafetensorError) as error:
            print(f"checkpoint at step {self.step} was not written ({error}); training goes on.",
                  file=sys.stderr)
            return False
        return True

    def export(self, model, about):
        """Write `model/`, what the next stage loads: the live weights, the sizes of the model
        (`cfg.model`), and `about` (what the data are). Every rank calls."""
        model = self.accelerator.unwrap_model(model)
        tensors = checkpoint.whole(self.accelerator, model.state_dict())
        kind = next(kind for kind in type(model).__mro__ if not hasattr(kind, "reshard"))  # FSDP2's
        sizes = {"model": dataclasses.asdict(self.cfg.model)} if hasattr(self.cfg, "model") else {}
        config = {"stage": self.stage, "class": kind.__name__, **sizes, **about,
                  "lineage": self.built_on}
        on_main(self.accelerator, export_model, self.folder / "model", tensors, config)

    def write(self, name, value):
        """Put a JSON file into the stage's folder (main process)."""
        write_json(self.folder / name, value)

    # ---- signals and the end

    def _catch_signals(self):
        """SIGTERM, SIGUSR1 (Slurm), SIGHUP, Ctrl-C: only set a flag; the next step agrees on it.

        Terminal, launcher and shell may each send it. A second Ctrl-C, seconds later, means: at
        once; a launcher passes that one on as SIGTERM.
        """
        requests = []

        def ask(number, frame):
            if requests and time.monotonic() - requests[-1][1] <= REPEATS:
                return
            requests.append((number, time.monotonic()))
            self.stop_requested = True
            if len(requests) > 1 and signal.SIGINT in (requests[0][0], number):
                raise KeyboardInterrupt

        numbers = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP}
        numbers -= {n for n in numbers if signal.getsignal(n) == signal.SIG_IGN}  # nohup
        self.handlers = {number: signal.signal(number, ask) for number in numbers}

    def _release_signals(self):
        """After the last step, or when the end is written: a launcher whose rank has died must not
        end this one before; and where a stop was asked for, it may be asked for again."""
        if not (self.stopping or self.stop_requested):
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self._finish(error)
        finally:
            self.agree.close()
            self._release_signals()
            if self.lock:
                self.lock.close()

    def _finish(self, error):
        if error is not None and self.cfg.dry_run:
            dry_run.end(self, error)
        elif error is None or isinstance(error, Stopped):
            if not self.finished:
                self._end("stopped" if error else "done", str(error or ""), 143 if error else 0)
            self.accelerator.end_training()
        elif self.started and not isinstance(error, PeerFailed):
            self._failed(error)
        elif isinstance(error, UsageError) and self.accelerator.is_main_process:
            folder.leave(self.folder)
        elif self.wandb:
            self.wandb.finish(1)

    def _failed(self, error):
        """Write the cause, from whichever rank knows it; say what is better said than raised."""
        memory, death = is_out_of_memory(error), ""
        if isinstance(error, RuntimeError | RunError) and not memory:  # of a lost connection?
            death = self.agree.deaths.story()
        own = str(error) if isinstance(error, RunError) else "".join(
            traceback.format_exception_only(error)).strip()
        reason = death or f"rank {self.accelerator.process_index}: {own}"
        if isinstance(error, UsageError) and not self.accelerator.is_main_process:
            print(f"error: {reason}", file=sys.stderr)  # `command` prints the main one's only
        if isinstance(error, KeyboardInterrupt):
            reason = f"stopped at once at step {self.step}; {self._saved()}"
            self._end("stopped", reason, 1)
            raise KeyboardInterrupt(reason) from None
        self._end("out_of_memory" if memory or MEMORY in death else "failed", reason, 1)
        if death:  # told now, before a launcher ends us too
            below = "" if self.accelerator.is_main_process else "\n"  # its progress bar
            print(f"{below}error: {death}; run the same command again.", file=sys.stderr)
            raise PeerFailed(death) from None

    def _end(self, status, reason, code):
        # Any rank may fail. The first one is the cause; others lose their connection after it.
        path = self.folder / "exit.json"
        mine = not path.exists() if code == 1 else self.accelerator.is_main_process
        with contextlib.suppress(*[OSError] if code == 1 else []):  # the disk is full: why we end
            if mine:
                write_json(path, {"status": status, "step": self.step, "reason": reason,
                                  "micro_batch": self.backward.micro_batch,
                                  "seconds": time.monotonic() - self.begun})
        if self.wandb:
            self.wandb.finish(code)
