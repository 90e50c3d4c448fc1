"""The fields that every stage has and that may change when a run resumes: systems, not science."""

import dataclasses
import math

from ups.config import UsageError, check

COUNTS = ("log_every eval_every save_every keep timeout steps batch_size patch stride_x "
          "stride_t start_every correct_every val_trajectories")
LIMITS = dict.fromkeys(COUNTS.split(), (1, math.inf)) | {  # in every stage that has such a field
    "micro_batch": (0, math.inf), "workers": (0, math.inf),
    "lr": (1e-12, math.inf), "weight_decay": (0, 1), "warmup": (0, math.inf),
    "grad_clip": (1e-9, math.inf), "ema": (0, 0.99999), "codec_error": (0, 1),
    "sigma_mean": (-20, 20), "sigma_std": (1e-3, 20), "members": (2, 65536), "seed": (0, 2**31)}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    data: tuple[str, ...] = ()   # files or folders with fields; empty: data/, made when absent
    tasks: tuple[str, ...] = ()  # which data sets of --data, as burgers1d:nu=0.01,0.1; empty: all
    axes: str = ""               # of an array whose file does not name them: "sample time x y"
    facts: str = ""              # YAML file with what is true of the data: docs/data.md
    run: str = ""                # folder of the run; empty: runs/ and the names of the data sets
    cache: str = "cache"         # where the latents are; made there when absent
    micro_batch: int = 0         # rows per process and forward pass, 0: all; memory, not science
    workers: int = 0             # loader processes per rank; the cache is memory-mapped, 0 is fast
    compile: bool = False        # compile the model; on CUDA also replay the step as a graph
    log_every: int = 50          # steps between two lines of training metrics
    eval_every: int = 500        # steps between two validations
    save_every: int = 500        # steps between two checkpoints
    keep: int = 2                # checkpoints that are kept
    timeout: int = 600           # seconds after which a rank that does not answer ends the run
    wandb: str = ""              # project of Weights & Biases; empty: none
    dry_run: bool = False        # rehearse: the last steps, an evaluation, a checkpoint; then stop

    def __post_init__(self):
        check(self, **{name: LIMITS[name] for name in vars(self) if name in LIMITS})
        if not self.cache:
            raise UsageError("--cache must name a folder.")
        if not self.run:
            from ups.data.find import names_of

            object.__setattr__(self, "run", f"runs/{'+'.join(names_of(self))}")
