"""How fast is a training step, and what do compile, graphs and bfloat16 change? One CUDA device.

    python -m benchmarks.step [--task burgers1d --preset medium --steps 300]

All speeds come from one process, side by side, on the same data: the loop of train_operator.py in
eager mode, with graphs or compilation alone, with both (`--compile`), then with its augmentations
and a loader worker; and a bare loop: the same compiled model, clipping and fused AdamW captured in
one graph, its data on the device, nothing of `ups/train`. Then the gradients that graphs accumulate
over micro-batches are compared with eager ones, both with exact products, and a roll-out of a
trained model in bfloat16 with one in float32.
"""

import dataclasses
import functools
import json
import tempfile
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

import train_operator as script
from benchmarks.watched import swapped
from ups.config import Parser, UsageError, command, flat
from ups.data.make import make
from ups.eval.rollout import predict
from ups.latents import open_latents
from ups.models.latent_operator import LatentOperator
from ups.models.precision import products
from ups.stages import load_operator
from ups.train.ranks import now
from ups.train.run import Run
from ups.train.step import Backward


def script_speed(cfg, compiled, graphs, steps):
    """Steps per second of the real loop, after a warm-up of a third of the steps."""
    cfg = dataclasses.replace(cfg, run=f"{cfg.run}/{time.time()}", steps=steps + steps // 3)
    stamps = {}

    class Timed(Backward):
        def __call__(self, batch):
            if batch["step"] in (steps // 3, cfg.steps - 1):
                stamps[batch["step"]] = now()
            return super().__call__(batch)

    class Chosen(Run):
        def __init__(self, *args):
            super().__init__(*args)
            self.graphs = graphs

    names = {"Backward": Timed, "Run": Chosen, "finish_operator": lambda *args: None}
    if not compiled:
        names["compile_model"] = lambda *args: None
    with swapped(script, **names):
        script.main(command_line(cfg))
    AcceleratorState._reset_state(reset_partial_state=True)
    (first, begin), (last, end) = sorted(stamps.items())
    return (last - first) / (end - begin)


def command_line(cfg):
    """The flags of the script that give `cfg`."""
    words = []
    for key, value in flat(cfg).items():
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        else:
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return words


def bare_speed(cfg, batch, loss, spec, steps):
    """The best a graph can do: forward, backward, clipping and AdamW in one replay."""
    torch.manual_seed(0)
    model = LatentOperator(cfg.model, [spec]).cuda()
    model.compile(dynamic=False)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, cfg.lr, fused=True, capturable=True)
    for p in params:
        p.grad = torch.zeros_like(p)

    def step():
        torch._foreach_zero_([p.grad for p in params])
        mean = loss(model, batch).mean()
        with products("high"):  # as in `Backward`
            mean.backward()
        torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip, foreach=True)
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for part in (steps // 3, steps):
        begin = now()
        for _ in range(part):
            graph.replay()
        speed = part / (now() - begin)
    return speed


def gradient_gap(run, cfg, batch, loss, spec):
    """Largest difference of accumulated gradients, graphs against eager, over the largest."""
    torch.manual_seed(0)
    model = LatentOperator(cfg.model, [spec]).cuda()
    for p in model.parameters():  # the identity at the start has gradients in one layer only
        p.data += 0.02 * torch.randn_like(p)
    grads = {}
    for graphs in (False, True):
        if graphs:
            model.compile(dynamic=False)
        backward = Backward(run, model, loss, cfg.batch_size // 4, graphs=graphs)
        for _ in range(5):  # two warm-ups, a capture, two replays
            backward(batch)
        grads[graphs] = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()
    return float((grads[True] - grads[False]).abs().max() / grads[False].abs().max())


def settings(folder, task, batch_size):
    """Of the script: the bare step, and with random moves and noise."""
    base = script.Config(run=str(folder / "runs"), data=str(folder / "data"),
                         cache=str(folder / "cache"), tasks=(task,),
                         batch_size=batch_size, log_every=50, eval_every=10**6,
                         save_every=10**6, val_trajectories=2, compile=True, augment=False,
                         noise=0.0)
    return base, dataclasses.replace(base, augment=True, noise=0.01)


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--task", default="burgers1d")
    parser.add_argument("--preset", default="medium")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--train_steps", type=int, default=4000, help="before the bf16 roll-out")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UsageError("this benchmark needs a CUDA device.")
    folder = Path(tempfile.mkdtemp())
    make(args.task, args.preset, folder / "data")
    base, full = settings(folder, args.task, args.batch_size)

    rows = {}
    for label, cfg, compiled, graphs in (
            ("eager", base, False, False), ("graphs alone", base, False, True),
            ("compiled alone", base, True, False), ("compiled, graphs", base, True, True),
            ("  and moves, noise", full, True, True),
            ("  and one worker", dataclasses.replace(full, workers=1), True, True)):
        rows[label] = script_speed(cfg, compiled, graphs, args.steps)
        print(f"{label}: {rows[label]:.1f} steps/s", flush=True)  # minutes before the table

    trained = dataclasses.replace(full, run=str(folder / "trained"), steps=args.train_steps)
    script.main(command_line(trained))
    AcceleratorState._reset_state(reset_partial_state=True)

    exact = dataclasses.replace(base, run=str(folder / "bench"))
    run = Run(exact, "operator")
    latents = open_latents(run.accelerator, base, "train")
    task, spec = latents.tasks[0], latents.tasks[0].spec
    loss = functools.partial(script.operator_loss, tasks=latents.tasks)
    triples = [(0, row, (0, row * 7)) for row in range(args.batch_size)]
    batch = latents.windows.__getitems__(triples)
    batch = {k: v.cuda() if torch.is_tensor(v) else v for k, v in batch.items()}
    rows["bare graph"] = bare_speed(base, batch, loss, spec, args.steps)
    print(f"bare graph: {rows['bare graph']:.1f} steps/s", flush=True)
    gap = gradient_gap(run, base, batch, loss, spec)

    model = load_operator(folder / "trained").model.cuda()
    chosen = task.fields.split("test")
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cuda", dtype, enabled=dtype == torch.bfloat16):
            result = predict(run.accelerator, model, task, 0, chosen)
        errors[dtype] = float(result["operator"].mean())

    name = torch.cuda.get_device_name()
    params = sum(p.numel() for p in model.parameters())
    print(f"\n{args.task} {args.preset}, {params / 1e6:.2f} M parameters, batch {args.batch_size}, "
          f"{name}, torch {torch.__version__}")
    print(f"{'':20}{'steps/s':>10}{'of bare':>10}")
    for label, speed in rows.items():
        print(f"{label:20}{speed:10.1f}{speed / rows['bare graph']:10.2f}")
    print(f"accumulated gradients, graphs against eager: largest relative difference {gap:.1e}")
    print(f"roll-out nRMSE after {args.train_steps} steps: float32 {errors[torch.float32]:.4f}, "
          f"bfloat16 {errors[torch.bfloat16]:.4f}")
    print(json.dumps({"steps_per_second": rows, "gradient_gap": gap}))


if __name__ == "__main__":
    command(main)
