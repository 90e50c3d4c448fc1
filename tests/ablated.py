"""A copied stage of known scores: each seed adds 0.01 to (lr - 0.3)^2. It needs no torch."""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

from ups.config import UsageError, command, flat, parse


@dataclasses.dataclass(frozen=True)
class Config:
    run: str = ""
    tasks: tuple[str, ...] = ()
    lr: float = 0.1
    kind: str = "a"         # a, or b, which fails, or c, which is refused, or s, which is stopped
    sign: bool = True
    several: tuple[int, ...] = (1,)
    steps: int = 10
    seed: int = 0

    def __post_init__(self):
        if self.kind not in "abcs":
            raise UsageError(f"--kind {self.kind}: it is a, b, c or s.")


def main(argv=None):
    cfg = parse(Config, argv)
    if cfg.kind == "c":
        raise UsageError("c is not for today.")
    stage, stopped = Path(cfg.run) / "toy", []
    stage.mkdir(parents=True, exist_ok=True)
    (stage / "config.json").write_text(json.dumps(flat(cfg)))
    with open(stage / "starts", "a") as file:
        print("start", file=file)
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    end = {"status": "failed" if cfg.kind == "b" else "done", "reason": "on purpose"}
    if cfg.kind == "s" and not (stage / "exit.json").exists():
        os.kill(os.getppid(), signal.SIGINT)  # Ctrl-C
        while not stopped:
            time.sleep(0.01)
        end["status"] = "stopped"
    val = (cfg.lr - 0.3) ** 2 + cfg.seed / 100
    lines = [{"step": cfg.steps, "val/mine": 2 - value, "val/nrmse_rollout": value}
             for value in (val + 5, val, val + 2)]  # the best one counts
    (stage / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (stage / "exit.json").write_text(json.dumps(end))
    sys.exit({"failed": 1, "stopped": 143, "done": 0}[end["status"]])


if __name__ == "__main__":
    command(main)
