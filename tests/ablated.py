"""A stage without a model: val = (lr - 0.3)^2 + seed / 100, test = val + 1; for tests of ablate."""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

from ups.config import UsageError, command, flat, parse
from ups.train.systems import RunConfig


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    lr: float = 0.1
    kind: str = "a"         # a, or b, which fails, or c, which is refused, or s, which is stopped
    sign: bool = True
    steps: int = 10
    pause: float = 0.0      # seconds of a step
    several: tuple[int, ...] = (1,)
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.kind not in "abcs":
            raise UsageError(f"--kind {self.kind}: it is a, b, c or s.")


def main(argv=None):
    cfg = parse(Config, argv)
    if cfg.kind == "c":
        raise UsageError("c is not for today.")
    stage = Path(cfg.run) / "toy"
    stage.mkdir(parents=True, exist_ok=True)
    (stage / "config.json").write_text(json.dumps(flat(cfg)))
    with open(stage / "starts", "a") as file:
        file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))

    def end(status, step):
        (stage / "exit.json").write_text(json.dumps(
            {"status": status, "step": step, "reason": "on purpose"}))

    with open(stage / "metrics.jsonl", "w") as file:
        for step in range(1, cfg.steps + 1):
            time.sleep(cfg.pause)
            if step % cfg.log_every == 0 or step == cfg.steps:
                print(json.dumps({"step": step, "train/loss": 1.0}), file=file, flush=True)
            if stopped:
                end("stopped", step)
                sys.exit(143)
        if cfg.kind == "s" and not (stage / "exit.json").exists():
            os.kill(os.getppid(), signal.SIGINT)  # Ctrl-C
            while not stopped:
                time.sleep(0.01)
            end("stopped", cfg.steps)
            sys.exit(143)
        val = (cfg.lr - 0.3) ** 2 + cfg.seed / 100
        for value in (val + 5, val, val + 2):  # the best one counts
            line = {"step": cfg.steps, "val/nrmse_rollout": value}
            print(json.dumps(line), file=file, flush=True)
    if cfg.kind == "b":
        end("failed", 3)
        sys.exit(1)
    (stage / "test.json").write_text(json.dumps(
        {"tasks": {"toy": {"nrmse_rollout": {"operator": val + 1}}}}))
    end("done", cfg.steps)


if __name__ == "__main__":
    command(main)
