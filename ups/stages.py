"""The door to what earlier stages of a run left: frozen models, ready to be built on.

A stage that is absent, not finished, or built on something else is refused in one sentence. An
exported folder has the layout of a run, `exit.json` and `config.json` of its stages included.
"""

import dataclasses
import importlib.util
import math
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

from torch import nn

from ups.config import UsageError, nested
from ups.data.facts import from_plain
from ups.files import read_json
from ups.models.body import BodyConfig
from ups.models.codec import build_codec
from ups.models.generators import Diffusion, Ensemble, Perturbed
from ups.models.latent_operator import LatentOperator, TaskSpec
from ups.train.checkpoint import load_model
from ups.train.run import RunConfig

GENERATORS = "ensemble", "diffusion", "consistency"
PERTURBATION = 0.01  # of inputs, in deviations of a field, where a run has not chosen
INHERITED = "data", "tasks", "axes", "facts", "cache"  # from the operator, unless they are given


@dataclasses.dataclass
class Loaded:
    """A finished stage of a run: its frozen model, and what it was trained with."""

    run: Path
    model: nn.Module           # in evaluation mode
    config: dict               # model/config.json: sizes, tasks, lineage
    settings: SimpleNamespace  # the stage's own configuration: tasks, strides, codec, ...
    mark: str                  # fingerprint
    choices: dict              # what it chose on validation: choices.json

    @property
    def facts(self):
        """{name: Facts} of the data sets, in the operator's order."""
        return {facts.name: facts for facts in map(from_plain, self.config["fields"])}

    @property
    def history(self):
        """How many frames the operator sees."""
        return getattr(self.settings, "history", 1)

    def plans(self, name):
        """{longest stride: validation errors by frame}: how roll-outs of a task may go."""
        known = self.choices.get(name, {}).get("plans", {})
        return {n: known.get(str(n), []) for n in getattr(self.settings, "strides", [1])}


def load_codec(run, name, lineage=None):
    """The codec of a data set in a run, frozen, and its fingerprint; with a `lineage` only the one
    that an operator of it was trained with."""
    config, tensors = load_model(Path(run) / "codec" / name / "model")
    mark = config.pop("fingerprint")
    if lineage is not None and lineage.get(f"codec of {name}") != mark:
        raise UsageError(f"{run}/codec/{name} is not the codec that {run}/operator was trained "
                         "with; put that one back.")
    codec = build_codec(config)
    codec.load_state_dict(tensors)
    return codec.eval().requires_grad_(False), mark


def load_operator(run, model=None):
    """`model` is the class of an operator of your own, called with its configuration and tasks.

    No code is ever loaded because a folder names it.
    """
    if not isinstance(known := model or LatentOperator, type):
        raise UsageError(f"model={model!r}: it is a class, as docs/template.md describes.")

    def build(config, tasks):
        if (name := config.get("class")) != known.__name__:
            cure = ("leave --model, or model=, out" if name == LatentOperator.__name__ else
                    f"say where its code is: `--model FILE.py:{name}`, or `model={name}` in Python")
            raise UsageError(f"{run} holds an operator of class {name}, not {known.__name__}; "
                             f"{cure}.")
        sizes = config["model"]
        return known(SimpleNamespace(**sizes) if model else BodyConfig(**sizes), tasks)

    return load_stage(run, "operator", build)


def load_class(text):
    """`my_model.py:Mine` -> the class Mine in that file, an operator as docs/template.md says."""
    if not text:
        return None
    path, _, name = text.rpartition(":")
    module = import_file(path, f"--model {text}: expected FILE.py:Class, and ")
    if not isinstance(kind := getattr(module, name, None), type):
        raise UsageError(f"--model {text}: {path} has no class {name}.")
    return kind


def import_file(path, said=""):
    """A Python file as a module; `said` begins the sentence where there is none."""
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(f"{said}there is no script {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def finished(run):
    """The stages of a run that draw members and are done."""
    return [stage for stage in GENERATORS
            if read_json(Path(run) / stage / "exit.json").get("status") == "done"]


def preferred(run, name):
    """The stage whose members of a task score best on val; `operator`: from perturbed inputs."""
    scores = {stage: read_json(Path(run) / stage / "choices.json").get(name, {}).get(
        "crps_ratio", math.inf) for stage in ("operator", *finished(run))}
    return min(scores, key=scores.get)


def load_generator(run, stage, operator):
    """What draws members, for this `operator` (Loaded), with what validation chose for it."""
    def build(config, tasks):
        sizes = BodyConfig(**config["model"])
        return (Ensemble(sizes, tasks) if stage == "ensemble"
                else Diffusion(sizes, tasks, operator.model, stage))

    loaded = (dataclasses.replace(operator, model=Perturbed(operator.model, None))
              if stage == "operator" else load_stage(run, stage, build))
    for parent in ("operator", "diffusion"):
        mark = read_json(Path(run) / parent / "model" / "config.json").get("fingerprint")
        if mark and loaded.config["lineage"].get(parent, mark) != mark:
            raise UsageError(f"{Path(run) / stage} was trained for another {parent} than the one "
                             f"in {Path(run) / parent}; train it again in a new --run.")
    known = [loaded.choices.get(name, {}) for name in operator.facts]
    default = PERTURBATION if stage == "operator" else 0.0
    loaded.model.calls = getattr(loaded.settings, "calls", 1)
    loaded.model.strength = [one.get("strength", 1.0) for one in known]
    loaded.model.perturbation = [one.get("perturbation", default) for one in known]
    return loaded


def inherit(cfg, operator):
    """`cfg` with the operator's tasks, strides and codec, and its data and cache unless given."""
    default = vars(RunConfig()) if isinstance(cfg, RunConfig) else {}  # of a stage: not given
    own = {name: value for name, value in vars(cfg).items()
           if name not in INHERITED or value != default.get(name)}
    if not any(Path(getattr(operator.settings, "cache", "")).glob("*/manifest.json")):
        own = {"cache": RunConfig.cache} | own  # never made where only a run, a stranger's, says
    return SimpleNamespace(**vars(operator.settings) | own, built_for=list(operator.facts))


def load_stage(run, stage, build):
    """The frozen model of a finished stage; build(config, tasks) makes it without its weights."""
    folder = Path(run) / stage
    end, begun = read_json(folder / "exit.json"), folder / "config.json"
    command = (f"`accelerate launch train_{stage}.py --run {shlex.quote(str(run))}"
               f"{f' --config {shlex.quote(str(begun))}' * begun.exists()}`")
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such stage yet; train it first with {command}.")
    if end.get("status") != "done":
        raise UsageError(f"{folder} is not finished (exit.json says {end.get('status')}); "
                         f"finish it first with {command}.")
    config, tensors = load_model(folder / "model")
    tasks = [TaskSpec(**{key: tuple(value) if isinstance(value, list) else value
                         for key, value in task.items()}) for task in config["tasks"]]
    try:
        model = build(config, tasks)
        model.load_state_dict(tensors)
    except (RuntimeError, KeyError, TypeError):
        raise UsageError(f"{folder} was written by another version of the model; train it anew "
                         "in another --run, or use the code that wrote it.") from None
    settings = nested(read_json(begun))
    if not vars(settings):
        raise UsageError(f"{folder} has no config.json; put it back, or train a new --run.")
    return Loaded(Path(run), model.eval().requires_grad_(False), config, settings,
                  config["fingerprint"], read_json(folder / "choices.json"))
