"""--init: a run that goes on from another one, on other data, or for longer.

The codec, the statistics in it, the scales of parameters and the unit of a step are the parent's;
so are the sizes of the model. Data sets match by their channels, PDE parameters by name; grid,
boundary, dt and parameters may be others.
"""

import dataclasses
from pathlib import Path

import torch

from ups.config import UsageError, build, flat
from ups.data.facts import from_plain
from ups.files import read_json
from ups.models.codec import build_codec
from ups.relative_error import mean_relative_error
from ups.stages import load_codec, load_operator
from ups.train.checkpoint import export_model, load_model

SIZES = "model", "codec", "history"
DATA = "data", "tasks", "axes", "facts", "stride_x", "stride_t"  # unless some are named


def adopt(cfg):
    """Let --init decide the sizes of `cfg` and, where no data are named, the data."""
    folder = Path(cfg.init) / "operator"
    if read_json(folder / "exit.json").get("status") != "done":
        raise UsageError(f"--init {cfg.init}: there is no finished operator in {folder}; give the "
                         "folder of a run.")
    if not cfg.run or Path(cfg.run).resolve() == Path(cfg.init).resolve():
        raise UsageError("--init begins a new run; name its folder by --run.")
    parent = build(type(cfg), read_json(folder / "config.json") | {"init": ""})
    for name in SIZES if cfg.data or cfg.tasks else SIZES + DATA:
        given, default, known = (getattr(one, name) for one in (cfg, type(cfg), parent))
        if given not in (default, known):
            new, old = flat(cfg), flat(parent)
            flag = next(key for key in new if key.split(".")[0] == name and new[key] != old[key])
            raise UsageError(f"--{flag} {new[flag]}: with --init {cfg.init} it is that run's, "
                             f"{old[flag]}; leave it out, and a --size that sets it.")
        object.__setattr__(cfg, name, known)


def inherit_codec(cfg, folder, fields):
    """Write the parent's codec for the grid and facts of `fields`, and say what it loses of them.

    What a new operator takes beside weights is written along: the index of the data set among the
    parent's, and the unit of a step.
    """
    init, old = cfg.init, read_json(Path(cfg.init) / "operator" / "config.json").get("strides")
    if old and old != (new := [*getattr(cfg, "strides", [1])]):
        print(f"{fields.facts.name}: {init} has learned strides {old}, and this run learns {new}.")
    config, _ = load_model(Path(init) / "operator" / "model")
    facts, known = fields.facts, [from_plain(about) for about in config["fields"]]
    index = _counterpart(init, facts, known)
    old, _ = load_codec(init, known[index].name, config["lineage"])
    patches, grid = (" x ".join(map(str, sizes)) for sizes in (old.patch, facts.grid))
    if any(n % p for n, p in zip(facts.grid, old.patch, strict=True)):
        raise UsageError(f"--init {init}: its patches of {patches} points do not fit the grid of "
                         f"{grid} of {facts.name}; leave --init out, or interpolate the data.")
    fields.facts = facts = _scaled(facts, known[index])
    codec = build_codec(old.config | {"facts": facts.plain(), "offset": 0.5 / fields.stride_x})
    codec.load_state_dict(old.state_dict())
    low, high = codec.seen
    for u in fields.stream(fields.split("train")):
        least, most = u.movedim(1, 0).flatten(1).aminmax(dim=1)
        low, high = low.minimum(least), high.maximum(most)
    codec.seen.copy_(torch.stack([low, high]))
    with torch.no_grad():
        errors = [mean_relative_error(codec.decode(codec.encode(u)), u)
                  for u in fields.stream(fields.split("val"))]
    print(f"{facts.name}: the codec of {init} loses {torch.cat(errors).mean():.2e} of it (nRMSE of "
          "the val split).")
    parent = {"run": Path(init).resolve().name, "operator": config["fingerprint"], "task": index,
              "change": config["tasks"][index]["change"],
              "dts": config["tasks"][index].get("dts", ())}
    export_model(folder, codec.state_dict(), codec.config | {"data": fields.digest,
                                                             "parent": parent})


def _counterpart(init, facts, known):
    """The place in `known` of the data set with these channels: of this name, or the first."""
    def channels(facts):
        return (f"{' '.join(facts.channels)} along {' '.join(facts.axes)}"
                f"{' given ' * bool(facts.inputs)}{' '.join(facts.inputs)}")

    fits = [k for k, other in enumerate(known) if channels(other) == channels(facts)]
    if not fits:
        raise UsageError(f"--init {init}: it knows {'; '.join(map(channels, known))}, and "
                         f"{facts.name} is {channels(facts)}; only a run on the same channels can "
                         "go on.")
    return next((k for k in fits if known[k].name == facts.name), fits[0])


def _scaled(facts, other):
    """`facts` with the other's scale of every parameter of which it saw more than one value."""
    known = {name: scale for name, scale in zip(other.params, other.scales, strict=True)
             if scale.low < scale.high}
    scales = []
    for name, new in zip(facts.params, facts.scales, strict=True):
        old = known.get(name, new)
        if old.log and new.low <= 0:
            raise UsageError(f"{facts.name}: {name} falls to {new.low:g}, and the run of --init "
                             "takes its logarithm; leave --init out.")
        scales.append(dataclasses.replace(old, low=new.low, high=new.high))
    return dataclasses.replace(facts, scales=tuple(scales))


def begin_from(cfg, model, data):
    """Give a new operator of `data` the weights of the run --init; without one, change nothing.

    A model of your own is asked to `take(other, origin)`: the parent's model and, for each of its
    tasks, the index of the parent's. One that cannot gets the parent's weights as they are.
    """
    if not cfg.init:
        return model
    theirs = read_json(Path(cfg.init) / "operator" / "model" / "config.json").get("class")
    if theirs != type(model).__name__:
        raise UsageError(f"--init {cfg.init}: its operator is a {theirs}, and this one a "
                         f"{type(model).__name__}; begin from a run of the same model.")
    other = load_operator(cfg.init, None if theirs == "LatentOperator" else type(model)).model
    try:
        if hasattr(model, "take"):
            model.take(other, [task.codec.config["parent"]["task"] for task in data.tasks])
        else:
            model.load_state_dict(other.state_dict())
    except RuntimeError:
        raise UsageError(f"--init {cfg.init}: its weights do not fit the model of these data; "
                         "leave --init out.") from None
    return model
