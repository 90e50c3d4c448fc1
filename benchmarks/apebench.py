"""APEBench (Koehler et al. 2024): our operator beside its own networks, on its data, by its metric.

    pip install apebench                      # beside requirements.txt; JAX on the CPU is enough
    python -m benchmarks.apebench             # goes on where it was stopped
    python -m benchmarks.apebench --scenarios diff_ks --models operator "UNet;12;2;relu"

The package makes 50 trajectories of 50 steps and trains its networks on all of them, by its own
protocol: 10,000 updates of one-step supervision. The operator is trained by `train_operator.py`
with default flags on a file of the same trajectories, of which it keeps 9 for choosing weights and
for its test. `perform_tests_on_rollout` judges every model on 30 other initial states. The number
is the geometric mean of the package's mean nRMSE over steps 1 to 100, twice as long as the
trajectories of the training. A model may have flags: "operator --model.dim 16 --model.depth 4".

Results lie in --out under a hash of what they depend on, and are never computed twice.
"""

import dataclasses
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # of a GPU that is shared

from benchmarks.scripts import CHILD
from benchmarks.tables import heading, row
from ups.config import UsageError, check, command, parse
from ups.files import read_json, write_json

ROOT = Path(__file__).resolve().parent.parent
SCENARIOS = ("diff_adv", "diff_burgers", "diff_ks_cons", "diff_kdv", "diff_fisher", "diff_disp",
             "diff_hyp_diff", "diff_diff", "diff_ks")
NETWORKS = "FNO;12;18;4;gelu", "UNet;12;2;relu", "Res;26;8;relu"
LEADS = 100  # steps that count


@dataclasses.dataclass(frozen=True)
class Config:
    scenarios: tuple[str, ...] = SCENARIOS  # names of apebench.scenarios.scenario_dict
    models: tuple[str, ...] = ("operator", *NETWORKS)
    axes: int = 1                # of space, 1 to 3
    seed: int = 0                # of the weights
    out: str = "benchmarks/results/apebench"  # data, runs and results by hash

    def __post_init__(self):
        check(self, axes=(1, 3), seed=(0, 2**31))


def measure(scenario, model, cfg, folder):
    """Train and judge one model; what is told of it."""
    begin = time.perf_counter()
    if model.split()[0] == "operator":
        parameters, rollout = by_operator(scenario, model.split()[1:], cfg, folder)
    else:
        parameters, rollout = by_apebench(scenario, model, cfg)
    seconds = time.perf_counter() - begin
    errors = scenario.perform_tests_on_rollout(rollout)["mean_nRMSE"][0]
    return {"parameters": parameters, "seconds": seconds, "nrmse": [float(e) for e in errors]}


def by_apebench(scenario, network, cfg):
    """One of the package's networks by the package's protocol, rolled out: (samples, T, C, *grid)"""
    import equinox
    import exponax
    import jax

    key, shuffle = jax.random.split(jax.random.PRNGKey(cfg.seed), 2)
    stepper = scenario.get_neural_stepper(task_config="predict", network_config=network, key=key)
    stepper, _, _ = scenario.get_trainer(train_config="one")(
        stepper, shuffle, record_loss_every=scenario.record_loss_every)
    leaves = jax.tree_util.tree_leaves(equinox.filter(stepper, equinox.is_inexact_array))
    roll = jax.jit(jax.vmap(exponax.rollout(stepper, scenario.test_temporal_horizon)))
    return sum(leaf.size for leaf in leaves), roll(scenario.get_test_ic_set())


def by_operator(scenario, flags, cfg, folder):
    """The operator by its own script, rolled out by the Simulator."""
    import jax.numpy
    import numpy

    from ups import Simulator
    from ups.data import write_fields

    data, run = folder / "data.h5", folder / "run"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_fields(data, numpy.asarray(scenario.get_train_data()), boundary="periodic",
                     dt=1.0)
    words = ["train_operator.py", "--run", run, "--data", data, "--cache", folder / "cache",
             "--seed", cfg.seed, *flags]
    with open(folder / "log.txt", "a") as log:
        done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, stdout=log, stderr=log,
                              env=CHILD)
    if done.returncode:
        raise UsageError(f"the training failed; {folder}/log.txt says why.")
    sim = Simulator.load(run)
    u0 = numpy.asarray(scenario.get_test_ic_set())
    u = sim.rollout(u0, scenario.test_temporal_horizon)
    return sum(p.numel() for p in sim.operator.model.parameters()), jax.numpy.asarray(u)


def score(result):
    """Geometric mean of the error over the first steps; infinite where a roll-out overflows."""
    errors = result["nrmse"][:LEADS]
    if not all(0 < e < math.inf for e in errors):
        return math.inf
    return math.exp(sum(map(math.log, errors)) / LEADS)


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    try:
        import apebench
    except ImportError:
        raise UsageError("this benchmark needs `pip install apebench`.") from None
    known = apebench.scenarios.scenario_dict
    for name in cfg.scenarios:
        if name not in known:
            raise UsageError(f"--scenarios {name}: it is one of {', '.join(sorted(known))}.")
    out, ratios = Path(cfg.out).resolve(), []
    heading(f"APEBench {cfg.axes}-D, {platform.machine()}, seed {cfg.seed}: geometric mean of the "
            f"mean nRMSE over steps 1 to {LEADS}", "scenario, model", "parameters", "seconds",
            "nRMSE", "ratio")
    for name in cfg.scenarios:
        scenario, scores = known[name](num_spatial_dims=cfg.axes), {}
        for model in cfg.models:
            about = [name, cfg.axes, shlex.split(model), cfg.seed]
            key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:8]
            folder = out / f"{name}_{cfg.axes}d_{model.split(';')[0].split()[0]}_{key}"
            if not (result := read_json(folder / "result.json")):
                result = measure(scenario, model, cfg, folder)
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / "result.json", result | {
                    "scenario": name, "model": model, "at": time.strftime("%Y-%m-%d")})
            scores[model] = score(result)
            theirs = [scores[m] for m in scores if not m.startswith("operator")]
            row(f"{name}, {model}", f"{result['parameters']:,}", f"{result['seconds']:.0f}",
                f"{scores[model]:.2e}", "")
        ours = [m for m in scores if m.startswith("operator")]
        for model in ours if theirs else ():
            ratio = scores[model] / min(theirs)
            ratios += [ratio] if model == ours[0] else []
            row(f"{name}, {model} / best network", "", "", "", f"{ratio:.3f}")
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"\n{ours[0]}: geometric mean of {len(ratios)} ratios {mean:.3f}, the largest "
              f"{max(ratios):.3f}.")


if __name__ == "__main__":
    command(main)
