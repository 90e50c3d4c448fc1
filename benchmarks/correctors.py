"""What a corrector gains and costs: operator, perturbed inputs, teacher and student, all leads.

    python -m benchmarks.correctors --run runs/burgers1d [--split val] [--members 16]

Scores are means over trajectories and all leads; `worst ratio` is the largest CRPS / absolute error
of the operator over the leads beyond 5, `gain` the share of the longest teacher's gain in CRPS.
Milliseconds are for one step of one ensemble, replayed as a CUDA graph where there is one.
"""

import functools
import math

import torch

from ups.config import Parser, command
from ups.eval.ensemble_scores import drawn, measure_ensemble, shaken, tuned_size
from ups.eval.metrics import DEFINITIONS, ratio
from ups.latents import open_tasks
from ups.models.diffusion import heun
from ups.stages import load_corrector, load_operator
from ups.train.ranks import make_accelerator, now
from ups.train.step import CudaGraphed

CALLS = (2, 4, 8, 16, 32)


def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("--run", default="runs/burgers1d")
    parser.add_argument("--split", default="test", choices=("val", "test"))
    parser.add_argument("--members", type=int, default=16)
    args = parser.parse_args(argv)
    accelerator = make_accelerator()
    device = accelerator.device
    operator = load_operator(args.run)
    teacher, student = (load_corrector(args.run, stage, operator)
                        for stage in ("diffusion", "consistency"))
    for loaded in (operator, teacher, student):
        loaded.model.to(device)
    for index, task in enumerate(open_tasks(accelerator, operator.settings)):
        judge = functools.partial(measure_ensemble, accelerator, task, index)
        size = tuned_size(judge, operator.model, task)
        draw = functools.partial(drawn, operator.model)
        rows = {"operator": shaken(operator.model, task, 0.0),
                f"perturbed input {size:g}": shaken(operator.model, task, size)}
        rows["dressed, no network"] = draw(teacher.model, 0)
        rows |= {f"teacher, {calls} calls": draw(teacher.model, calls) for calls in CALLS}
        rows["teacher, Heun, 31 calls"] = draw(teacher.model, 31, sampler=heun)
        rows |= {f"student, {calls} calls": draw(student.model, calls) for calls in (1, 2)}
        count = {label: 1 if label == "operator" else args.members for label in rows}
        scores = {label: judge(args.split, row, count[label]) for label, row in rows.items()}
        times = {label: milliseconds(task, index, count[label], row, device)
                 for label, row in rows.items()}
        print_table(args, task, count, scores, times, device)
    print("\n".join(DEFINITIONS[name] + "." for name in ("nrmse", "crps", "spread_skill",
                                                         "spectrum_error")))


@torch.no_grad()
def milliseconds(task, index, members, draw, device, repeats=20):
    """Of one step of one ensemble: the operator and `members` draws."""
    tokens = math.prod(task.spec.tokens)
    z0 = torch.randn(1, tokens, task.width, device=device)
    dt = torch.full((1,), task.fields.facts.dt, device=device)
    cond = task.cond(task.fields.split("val")[:1]).to(device)
    noise = torch.randn(1, members, 2, tokens, task.width, device=device)
    step = CudaGraphed(lambda: next(draw(z0, 1, dt, cond, index, noise, leads=None)),
                    device.type == "cuda")
    for _ in range(4):
        step()
    laps = []
    for _ in range(repeats):
        start = now()
        step()
        laps.append(now() - start)
    return 1e3 * sorted(laps)[repeats // 2]


def print_table(args, task, count, scores, times, device):
    alone = scores["operator"]["crps"].mean(0)
    best = alone.mean() - scores[f"teacher, {CALLS[-1]} calls"]["crps"].mean()
    print(f"\n{task.name}, {args.split} split, {len(task.fields.split(args.split))} trajectories, "
          f"{args.members} members, {device}")
    print(f"{'':24}{'nRMSE mean':>11}{'nRMSE one':>11}{'CRPS':>11}{'ratio':>8}{'worst':>8}"
          f"{'gain':>8}{'spread/skill':>14}{'high band':>11}{'ms/step':>9}")
    for label, score in scores.items():
        crps = score["crps"].mean(0)
        spread = ratio(score["variance"].mean(0), score["square_error"].mean(0), count[label])
        low, high = spread.min().item(), spread.max().item()
        band = (score["surplus"].mean(0) / score["energy"].mean(0)).mean()
        share = crps / alone
        print(f"{label:24}{score['nrmse_mean'].mean():11.3e}{score['nrmse_sample'].mean():11.3e}"
              f"{crps.mean():11.3e}{share.mean():8.3f}{share[min(5, len(share) - 1):].max():8.3f}"
              f"{(alone.mean() - crps.mean()) / best:8.2f}{f'{low:.2f} to {high:.2f}':>14}"
              f"{band:11.3f}{times[label]:9.2f}")


if __name__ == "__main__":
    command(main)
