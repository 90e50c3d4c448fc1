"""Two ranks over real NCCL on one NVIDIA card: DDP, FSDP2, offload, resume, memory, out of memory.

    python tests/gpu/two_ranks_one_card.py [--out FOLDER]     about three minutes on an H200
    python tests/gpu/two_ranks_one_card.py --cpu              the same over gloo, small, no memory

NCCL refuses two ranks on one device unless they seem to be on two machines: each launcher gets its
own NCCL_HOSTID, and they meet on loopback. The reference is one process, this one. The end is a
table; the exit code is 1 if one cell failed. Logs of all launchers stay in FOLDER.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "train")]

import fsdp_on_cpu  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from parts import BOX, CIRCLE, LINE, SQUARE, Windows, full, loss  # noqa: E402

from ups.models import precision  # noqa: E402
from ups.models.body import BodyConfig  # noqa: E402
from ups.models.latent_operator import LatentOperator, TaskSpec  # noqa: E402
from ups.train import noise  # noqa: E402
from ups.train.ema import EMA  # noqa: E402
from ups.train.optim import set_lr  # noqa: E402
from ups.train.run import Run, RunConfig  # noqa: E402
from ups.train.step import Backward  # noqa: E402

DEADLINE = 350  # seconds for everything
OOM_STEP = 4    # the step before which rank 1 takes the memory
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    steps: int = 20
    batch_size: int = 16
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Case:
    model: BodyConfig
    tasks: tuple[TaskSpec, ...]
    precision: str = "no"
    steps: int = 20
    batch_size: int = 16
    saved: int = 10  # the step of the checkpoint; 0: none
    bound: float = 1e-5  # of the losses' relative distance from those of one process


SMALL = BodyConfig(body="pdet", dim=32, depth=3, heads=4, window=4)
PLANE = TaskSpec("plane", (1, 16, 16), 3, CIRCLE)
CASES = {
    "fp32": Case(SMALL, (LINE, SQUARE, BOX)),
    "bf16": Case(SMALL, (LINE, SQUARE, BOX), precision="bf16", bound=2e-2),
    "oom": Case(BodyConfig(body="plain", dim=256, depth=8, heads=8), (PLANE,), steps=8,
                batch_size=256, saved=0),  # some 10 GiB of activations on each rank
    "300M": Case(BodyConfig(body="plain", dim=1024, depth=18, heads=16), (LINE,), steps=2,
                 batch_size=4, saved=0),
}
CONFIGS = {"ddp": "2gpu.yaml", "fsdp": "2gpu_fsdp.yaml", "offload": "8gpu_fsdp_offload.yaml"}
JOBS = {  # case, or case and the strategy that wrote the checkpoint to go on from
    "ddp": ["fp32", "bf16", "fp32 one", "fp32 ddp", "bf16 ddp", "oom", "300M"],
    "fsdp": ["fp32", "bf16", "fp32 one", "fp32 ddp", "fp32 fsdp", "bf16 fsdp", "300M"],
    "offload": ["fp32", "fp32 fsdp", "fp32 offload", "300M"],
    "one": ["fp32 ddp", "fp32 fsdp", "fp32 offload"],
}
REFERENCE = ["fp32", "bf16", "oom"]


# ---- one rank


def chosen(strategy, precision, cpu):
    """Let the next `Run` have this precision; on CUDA the launcher's YAML gives the strategy."""
    if cpu:
        return fsdp_on_cpu.strategy(strategy, precision)
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    if strategy != "one" and PartialState._shared_state:  # as before the first Accelerator
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return contextlib.nullcontext()


def train(case, strategy, folder, cpu):
    """Train to the end, from a checkpoint in `folder` if there is one; return what was measured."""
    gc.collect()
    if not cpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    cfg = Config(run=str(folder), steps=case.steps, batch_size=case.batch_size)
    with chosen(strategy, case.precision, cpu):
        run = Run(cfg, "card")
    accelerator, began = run.accelerator, time.perf_counter()
    model = LatentOperator(case.model, case.tasks)
    total = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    loader = run.loader(Windows(case.tasks, torch.float32))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ema = EMA(model, 0.9)
    backward = Backward(run, model, functools.partial(loss, tasks=case.tasks))
    run.resume(model, optimizer, ema, backward, built_on={})
    start, losses, hog = run.step, [], None
    for batch in run.progress(loader):
        if case is CASES["oom"] and run.step == OOM_STEP and accelerator.process_index == 1:
            hog = take_memory()
        batch["noise"] = noise.normal(batch, cfg, *batch["z"].shape[2:], use="noise")
        losses.append(float(backward(batch)))
        full(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        set_lr(optimizer, 1e-3 / (1 + (run.step - 1) / 10))
        optimizer.step()
        ema.update(model)
        if run.step == case.saved:
            run.save()
    del hog
    run.agree.close()
    if run.lock:
        run.lock.close()  # and no more: the end of a run is the end of the process group
    return {"start": start, "losses": losses, "splits": backward.splits, "total": total,
            "micro_batch": backward.micro_batch, "world": accelerator.num_processes,
            "kind": str(accelerator.distributed_type).split(".")[-1],
            "backend": str(dist.get_backend_config()) if dist.is_initialized() else "none",
            "held": sum(local(p).numel() for p in model.parameters()),
            "peak": 0 if cpu else torch.cuda.max_memory_allocated() - before,
            "seconds": time.perf_counter() - began}


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def take_memory():
    """Fill the card but for three quarters of what a step took so far: half a batch fits."""
    step = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(free - int(0.75 * step), dtype=torch.uint8, device="cuda")


def work(strategy, jobs, out, cpu):
    """All that one strategy has to do, on this rank; what is measured is written as it comes."""
    rank = int(os.environ.get("RANK", 0))
    path = out / f"{strategy}_rank{rank}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for job in jobs:
        name, *first = job.split()
        if cpu and name in ("oom", "300M"):
            continue
        folder = out / name / "-".join([*first, strategy])
        if first:
            step = f"card/checkpoints/step_{CASES[name].saved}"
            if not (out / name / first[0] / step).exists():
                continue  # that strategy did not get so far, and has a cell that says so
            if rank == 0:
                shutil.copytree(out / name / first[0] / step, folder / step)
                shutil.copy(out / name / first[0] / "card" / "config.json", folder / "card")
            if dist.is_initialized():
                dist.barrier()
        results[job] = train(CASES[name], strategy, folder, cpu)
        path.write_text(json.dumps(results))
        print(f"{job}: {results[job]['seconds']:.1f} s", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- two launchers


def pair(strategy, out, cpu, limit):
    """Start two launchers as two machines on loopback; again once if they do not even meet."""
    for attempt in (1, 2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launchers, logs = [], []
        for rank in (0, 1):
            env = {**os.environ, "NCCL_HOSTID": f"node{rank}", "NCCL_SOCKET_IFNAME": "lo",
                   "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1",
                   "OMP_NUM_THREADS": "1" if cpu else "4", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
            env.pop("ACCELERATE_MIXED_PRECISION", None)  # ours, from the reference
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
                       ROOT / "accelerate_configs" / CONFIGS[strategy], "--num_machines", 2,
                       "--num_processes", 2, "--machine_rank", rank, "--main_process_ip",
                       "127.0.0.1", "--main_process_port", port, __file__, "--out", out,
                       "--strategy", strategy, *(["--cpu"] if cpu else [])]
            logs.append(out / f"{strategy}_launcher{rank}_{attempt}.log")
            with logs[-1].open("w") as log:
                launchers.append(subprocess.Popen(
                    list(map(str, command)), env=env, cwd=ROOT, start_new_session=True,
                    stdout=log, stderr=subprocess.STDOUT))
        end = time.monotonic() + limit
        while any(p.poll() is None for p in launchers) and time.monotonic() < end:
            if any(p.poll() for p in launchers):
                end = min(end, time.monotonic() + 10)  # one failed: the other has little time left
            time.sleep(0.2)
        for p in launchers:
            p.terminate()  # a launcher ends its worker, by force after the time above
        for p in launchers:
            try:
                p.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()
        codes = [p.returncode for p in launchers]
        if codes == [0, 0]:
            return
        print(f"{strategy}: launchers ended with {codes}; see {logs[0]} and {logs[1]}")
        for log in logs:
            print("\n".join(log.read_text(errors="replace").splitlines()[-25:]))
        if list(out.glob(f"{strategy}_rank*.json")):
            return


# ---- the table


def compare(out, cpu):
    """Rows (what, expected, measured, passed) from the files that the ranks wrote."""
    found = {}
    for path in out.glob("*_rank*.json"):
        strategy, rank = path.stem.split("_rank")
        found[strategy, int(rank)] = json.loads(path.read_text())
    one, rows = found.get(("one", 0), {}), []
    backend = "gloo" if cpu else "nccl"

    def cell(strategy, job, what, expected, check):
        ranks = (0,) if strategy == "one" else (0, 1)
        try:
            measured, passed = check(*[found[strategy, rank][job] for rank in ranks])
        except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
            measured, passed = f"not measured ({type(error).__name__})", False
        rows.append((f"{strategy} {job}: {what}", expected, measured, passed))

    def curve(job, bound):
        name = job.split()[0]

        def check(*ranks):
            mine, reference = ranks[0]["losses"], one[name]["losses"][ranks[0]["start"]:]
            gaps = [abs(a - b) / max(1e-9, abs(b)) for a, b in zip(mine, reference, strict=True)]
            same = all(rank["losses"] == mine for rank in ranks)
            resumed = ranks[0]["start"] == (CASES[name].saved if " " in job else 0)
            text = f"{max(gaps):.1e} over {len(gaps)} steps" + ("" if same else ", ranks differ")
            return text, max(gaps) < bound and same and resumed
        return check

    for strategy, jobs in JOBS.items():
        if cpu and strategy == "offload":
            continue
        for job in jobs:
            name = job.split()[0]
            if name == "300M" or cpu and name == "oom" or cpu and "offload" in job:
                continue
            bound = CASES[name].bound
            what = "losses against one process" + (", resumed" if " " in job else "")
            cell(strategy, job, what, f"< {bound:.0e}", curve(job, bound))
        if strategy != "one":
            wanted = {"ddp": "MULTI_CPU" if cpu else "MULTI_GPU"}.get(strategy, "FSDP")
            cell(strategy, "fp32", "kind, backend, processes", f"{wanted} 2 ranks {backend}",
                 lambda a, b, w=wanted: (
                     f"{a['kind']} {a['world']} ranks {a['backend']}",
                     (a["kind"], a["world"]) == (w, 2) and backend in a["backend"]))
            share = 1.0 if strategy == "ddp" else 0.5
            cell(strategy, "fp32", "share of the weights on rank 1", f"{share:.0%}",
                 lambda a, b, s=share: (f"{b['held'] / b['total']:.1%}",
                                        abs(b["held"] / b["total"] - s) < 0.02))
    if cpu:
        return rows

    half = CASES["oom"].batch_size // 4
    cell("ddp", "oom", f"splits, micro-batch after step {OOM_STEP}",
         f">= 1, <= {half} on both", lambda a, b: (
             f"{b['splits']}, {a['micro_batch']} and {b['micro_batch']}",
             b["splits"] >= 1 and a["micro_batch"] == b["micro_batch"] <= half))
    peaks = {s: max(found.get((s, r), {}).get("300M", {}).get("peak", 0) for r in (0, 1))
             for s in ("ddp", "fsdp", "offload")}
    limits = {"ddp": ("at most 40 bytes per parameter", 40 * 302e6),
              "fsdp": ("< 0.65 of DDP", 0.65 * peaks["ddp"]),
              "offload": ("< 0.5 of FSDP2", 0.5 * peaks["fsdp"])}
    for strategy, (expected, limit) in limits.items():
        cell(strategy, "300M", "peak GiB on ranks 0, 1", expected, lambda a, b, limit=limit: (
            f"{a['peak'] / GIB:.2f}, {b['peak'] / GIB:.2f} ({a['total'] / 1e6:.0f}M weights)",
            0 < max(a["peak"], b["peak"]) < limit))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path, help="where logs and results go; a temporary folder")
    parser.add_argument("--strategy", choices=CONFIGS, help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args()
    precision.TRAINING = "highest"  # TF32 rounds other numbers of rows differently: 1e-5 in 8 steps
    if args.strategy:
        return work(args.strategy, JOBS[args.strategy], args.out, args.cpu)
    if not args.cpu and not torch.cuda.is_available():
        sys.exit("error: there is no NVIDIA card here; --cpu runs what needs none.")

    began = time.monotonic()
    out = (args.out or Path(tempfile.mkdtemp(prefix="two_ranks_"))).absolute() / "two_ranks"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for strategy in ("reference", "ddp", "fsdp", "offload", "one"):
        if args.cpu and strategy == "offload":
            continue
        left, started = DEADLINE - (time.monotonic() - began), time.monotonic()
        try:
            if strategy in ("reference", "one"):
                work("one", REFERENCE if strategy == "reference" else JOBS["one"], out, args.cpu)
                gc.collect()
                if not args.cpu:
                    torch.cuda.empty_cache()  # the ranks need the card
            else:
                pair(strategy, out, args.cpu, min(120, max(20, left)))
        except Exception:  # the table is printed whatever happens
            traceback.print_exc()
        print(f"-- {strategy}: {time.monotonic() - started:.0f} s", flush=True)

    rows = compare(out, args.cpu)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        text = "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=False))
        print(text, "pass" if row[3] else "FAIL", sep="  ")
    failed = sum(not row[3] for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} pass, {time.monotonic() - began:.0f} s; see {out}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
