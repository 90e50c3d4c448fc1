"""Two hundred random faults, 60 in a sitting: `pytest -m soak tests/soak`, again and again.

    SOAK_KILLS=20 SOAK=runs/soak SOAK_TIMEOUT=8 pytest -m soak tests/soak -s

A life is one run of 60 steps that is hit, by a fault drawn from (seed, number), at each of its
first launches, and then comes to its end. Its weights are those of a run that nobody disturbed: bit
for bit where every launch had the same processes and wrapper, to 1e-9 in float64 where the number
of processes (1 to 3) and the wrapper (DDP, FSDP2) were drawn anew. SOAK/log.jsonl keeps every fault
of every sitting; a broken promise ends the sitting.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from watching import begin, ending, losses, saved

ROOT = Path(__file__).parents[2]
SEED, STEPS, HITS = 0, 60, 6
TIMEOUT = int(os.environ.get("SOAK_TIMEOUT", 8))  # more where others load the machine
LIMIT = 300 + 20 * TIMEOUT  # seconds of a launch
FLAGS = ("--steps", STEPS, "--save_every", 3, "--keep", 3, "--timeout", TIMEOUT)
FAULTS = ("rank", "launcher SIGKILL", "launcher SIGTERM", "launcher SIGINT", "save half",
          "save unnamed", "save unpruned", "freeze", "full disk", "bit")


@pytest.mark.soak
def test_what_is_hit_at_random_ends_as_if_nothing_had_been(tmp_path):
    folder = Path(os.environ.get("SOAK", ROOT / "runs" / "soak")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    known = list(map(json.loads, log.read_text().splitlines())) if log.exists() else []
    hits = sum("fault" in line for line in known)
    life = sum("gap" in line for line in known)
    wanted = min(200, hits + int(os.environ.get("SOAK_KILLS", 60)))

    def note(**line):
        print(line, flush=True)
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    while hits < wanted:
        hits += live(tmp_path, life, note)
        life += 1


def live(folder, life, note):
    """One life; returns how often it was hit."""
    draw = random.Random(f"{SEED} {life}")
    steady = life % 2 == 0  # the same processes and wrapper in every launch
    shape, hits = drawn(draw), 0
    place = folder / f"life{life}"
    for number in range(HITS):
        if not steady:
            shape = drawn(draw)
        line = hit(place, draw, f"{life}.{number}", shape)
        note(life=life, **line)
        if line["end"] == "done":  # the fault came too late
            break
        hits += 1
    began = time.monotonic()
    last = play(place, {"name": "run"}, shape).end(LIMIT)
    assert last.returncode == 0 and ending(place / "run")["status"] == "done", last.stderr[-5000:]
    sound = reference(folder, shape if steady else (1, False))
    weights, expected = (load_file(one / "toy" / "model" / "model.safetensors")
                         for one in (place / "run", sound))
    assert weights.keys() == expected.keys() and len(weights) > 5
    gap = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    assert gap < 1e-9 and (gap == 0 or not steady), (life, shape, gap)
    assert losses(place / "run").keys() == set(range(1, STEPS + 1))
    note(life=life, gap=gap, steady=steady, shape=shape, seconds=round(time.monotonic() - began))
    shutil.rmtree(place)
    return hits


def drawn(draw):
    """Number of processes, and whether FSDP2 wraps the model."""
    world = draw.randint(1, 3)
    return world, world > 1 and draw.random() < 0.5


def play(place, spec, shape):
    world, sharded = shape
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"} | ({"SHARDED": "1"} if sharded else {})
    config = "2gpu_fsdp.yaml" if sharded else "2gpu.yaml" if world > 1 else "1gpu.yaml"
    return begin(place, [spec], *FLAGS, env=env, processes=world, config=config, fresh=True)


def hit(place, draw, name, shape):
    """One launch that a fault ends before its time; what is there afterwards."""
    world, run = shape[0], place / "run"
    fault = draw.choice(FAULTS)
    rank, step = draw.randrange(world), draw.randint(1, 7)
    early, instant = draw.random() < 0.2, draw.random()
    newest = max(saved(run), default=0)
    spec = {"name": "run", "pace": 0.1}
    if fault.startswith("save"):
        step = newest // 3 * 3 + 3 - newest
        spec |= {"kill": "SIGKILL", "rank": 0, "point": fault.split()[1], "step": newest + step}
    if fault == "full disk":
        spec |= {"full": 2000, "step": newest + step}
    if fault == "bit" and newest:
        flip(run / "toy" / "checkpoints" / f"step_{newest}" / "state.safetensors", draw)
    before = max(saved(run), default=0)
    for path in run.glob("pid*"):
        path.unlink()
    began, since = time.monotonic(), time.time()
    launch = play(place, spec, shape)
    if early and not fault.startswith(("save", "full", "freeze")):  # there torch waits 30 minutes
        time.sleep(10 * instant)
    else:
        reach(run, launch, newest + step, since)
        time.sleep(instant / 5)
    struck = time.monotonic()
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended already
        if fault.startswith("launcher"):
            os.kill(launch.pid, getattr(signal, fault.split()[1]))
        elif fault in ("rank", "bit"):
            os.kill(pid(run, rank), signal.SIGKILL)
        elif fault == "freeze":
            os.kill(pid(run, rank), signal.SIGSTOP)
            if world == 1:  # nobody waits for it
                time.sleep(TIMEOUT + 2)
                os.kill(launch.pid, signal.SIGTERM)
                os.kill(pid(run, rank), signal.SIGCONT)
    with contextlib.suppress(OSError):
        if not (run / f"pid{rank}").exists():  # so early that no rank is there
            launch.process.terminate()
    launch.end(LIMIT, linger=60)
    after, end = max(saved(run), default=0), (ending(run) or {}).get("status")
    assert after >= before, (name, fault, before, after)
    if fault == "bit" and newest and "resuming" in launch.stdout:
        assert f"resuming from {run}/toy/checkpoints/step_{before}" in launch.stdout
    return {"fault": fault, "number": name, "world": world, "fsdp": shape[1], "early": early,
            "rank": rank, "before": before, "after": after, "end": end,
            "reason": (ending(run) or {}).get("reason"),
            "resumed": "resuming from" in launch.stdout,
            "seconds": round(time.monotonic() - struck, 1),
            "launch": round(time.monotonic() - began, 1)}


def pid(run, rank):
    return int((run / f"pid{rank}").read_text())


def reach(run, launch, step, since):
    """Wait until this launch has recorded a step, or has ended."""
    limit = time.monotonic() + LIMIT
    while launch.returncode is None and time.monotonic() < limit:
        with contextlib.suppress(OSError, ValueError, IndexError):
            written = (run / "toy" / "metrics.jsonl").stat().st_mtime  # a resume cuts it first
            if written > since and max(losses(run)) >= step and (run / "pid0").exists():
                return
        time.sleep(0.05)


def flip(path, draw):
    """Turn one bit over, without a change of size."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def reference(folder, shape):
    """A run that nobody disturbed, made once."""
    place = folder / f"sound {shape[0]} {shape[1]}"
    if not place.exists():
        done = play(place, {"name": "run"}, shape).end(LIMIT)
        assert done.returncode == 0, done.stderr[-5000:]
    return place / "run"
