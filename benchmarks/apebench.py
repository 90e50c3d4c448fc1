"""APEBench (Koehler et al. 2024): our operator beside its own networks, on its data, by its metric.

    pip install apebench                      # beside requirements.txt; JAX on the CPU is enough
    python -m benchmarks.apebench             # goes on where it was stopped
    python -m benchmarks.apebench --scenarios diff_ks --models operator "UNet;12;2;relu"

The package makes 50 trajectories of 50 steps and trains its networks on all of them, by its own
protocol: 10,000 updates of one-step supervision. The operator is trained by `train_operator.py`
with default flags on the same trajectories, of which it keeps 9 for choosing weights and for its
test. The package judges every model on 30 other initial states. The number is the geometric mean of
its mean nRMSE over steps 1 to 100, twice as long as the trajectories of the training. A model may
have flags: "operator --model.dim 16 --model.depth 4".

Results lie in --out under a hash and are never computed twice.
"""

import dataclasses
import math
import shlex
import time
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from benchmarks.bench import device_name, digest, heading, row, train_operator
from ups import Simulator
from ups.config import UsageError, check, command, parse
from ups.data import write_fields
from ups.files import read_json, write_json

SCENARIOS = ("diff_adv", "diff_burgers", "diff_ks_cons", "diff_kdv", "diff_fisher", "diff_disp",
             "diff_hyp_diff", "diff_diff", "diff_ks")
NETWORKS = "FNO;12;18;4;gelu", "UNet;12;2;relu", "Res;26;8;relu"
LEADS = 100  # steps that count


@dataclasses.dataclass(frozen=True)
class Config:
    scenarios: tuple[str, ...] = SCENARIOS  # names of apebench.scenarios.scenario_dict
    models: tuple[str, ...] = ("operator", *NETWORKS)  # a network's own text
    axes: int = 1                # of space, 1 to 3
    seed: int = 0                # of the weights
    out: str = "benchmarks/results/apebench"  # data, runs and results by hash

    def __post_init__(self):
        check(self, axes=(1, 3), seed=(0, 2**31))


def by_apebench(scenario, network, cfg):
    """One of the package's networks by its protocol, rolled out: (samples, T, C, *grid)."""
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


def by_operator(data, flags, cfg, folder):
    """The operator by its own script, rolled out by the Simulator."""
    train_operator(folder / "log.txt", folder / "run", data / "data.h5", cfg.seed, flags)
    sim = Simulator.load(folder / "run")
    u = sim.rollout(np.load(data / "u0.npy"), read_json(data / "about.json")["steps"])
    return sum(p.numel() for p in sim.operator.model.parameters()), u


def measure(scenario, data, model, cfg, folder):
    """Train a model and roll it out, where that is not done; then let the package judge it."""
    result = read_json(folder / "result.json")
    if not result:
        folder.mkdir(parents=True, exist_ok=True)
        begin, (kind, *flags) = time.perf_counter(), shlex.split(model)
        parameters, rollout = (by_operator(data, flags, cfg, folder) if kind == "operator"
                               else by_apebench(scenario, model, cfg))
        np.save(folder / "rollout.npy", np.asarray(rollout))
        result = {"model": model, "parameters": parameters, "device": device_name(),
                  "seconds": time.perf_counter() - begin, "at": time.strftime("%Y-%m-%d")}
        write_json(folder / "result.json", result)
    if "nrmse" not in result:
        errors = scenario.perform_tests_on_rollout(np.load(folder / "rollout.npy"))["mean_nRMSE"]
        result["nrmse"] = [float(e) for e in errors[0]]
        write_json(folder / "result.json", result)
    return result


def write_data(scenario, data):
    """The trajectories of the training as one of our files, and the states to start from."""
    if (data / "about.json").exists():
        return
    data.mkdir(parents=True, exist_ok=True)
    axes = ("x", "y", "z")[:scenario.num_spatial_dims]
    write_fields(data / "data.h5", np.asarray(scenario.get_train_data()), axes=axes,
                 boundary=["periodic"] * len(axes), dt=1)
    np.save(data / "u0.npy", np.asarray(scenario.get_test_ic_set()))
    write_json(data / "about.json", {"steps": scenario.test_temporal_horizon})


def score(result):
    """Geometric mean of the error over the first steps; infinite where a roll-out overflows."""
    errors = result.get("nrmse", [])[:LEADS]
    fine = len(errors) == LEADS and all(0 < e < math.inf for e in errors)
    return geometric_mean(errors) if fine else math.inf


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    out, ratios = Path(cfg.out).resolve(), {}
    try:
        from apebench.scenarios import scenario_dict as known
    except ImportError:
        raise UsageError("this benchmark needs `pip install apebench`.") from None
    heading(f"APEBench {cfg.axes}-D, {device_name()}, seed {cfg.seed}: geometric mean of the mean "
            f"nRMSE over steps 1 to {LEADS}", "scenario, model", "parameters", "seconds", "nRMSE",
            "ratio", "device")
    for name in cfg.scenarios:
        if name not in known:
            raise UsageError(f"--scenarios {name}: it is one of {', '.join(sorted(known))}.")
        scenario, scores = known[name](num_spatial_dims=cfg.axes), {}
        data = out / f"{name}_{cfg.axes}d"
        write_data(scenario, data)
        for model in cfg.models:
            key = digest([name, cfg.axes, shlex.split(model), cfg.seed])
            folder = out / f"{data.name}_{model.split(';')[0].split()[0]}_{key}"
            result = measure(scenario, data, model, cfg, folder)
            scores[model] = score(result)
            row(f"{name}, {model}", f"{result['parameters']:,}", f"{result['seconds']:.0f}",
                f"{scores[model]:.2e}", "", result["device"])
        ours = [model for model in scores if model.startswith("operator")]
        theirs = [scores[model] for model in scores if model not in ours]
        for model in ours if theirs else ():
            ratio = scores[model] / min(theirs)
            ratios.setdefault(model, []).append(ratio)
            row(f"{name}, {model} / best network", "", "", "", f"{ratio:.4f}", "")
    for model, found in ratios.items():
        print(f"\n{model}: geometric mean of {len(found)} ratios {geometric_mean(found):.4f}, the "
              f"largest {max(found):.4f}.")


if __name__ == "__main__":
    command(main)
