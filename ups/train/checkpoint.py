"""Checkpoints to resume from, and models to hand to the next stage. No pickle anywhere.

    checkpoints/step_N/  state.safetensors  weights, optimizer, averages: whole tensors, so that
                                            any number of processes, DDP or FSDP2, can load them
                         state.json         step, schedule, scores, configuration, lineage
                         manifest.json      size and sha256 of both, written last
    model/               model.safetensors and config.json with the fingerprint of the two

A checkpoint is written under a temporary name, flushed, and renamed; older ones go only after that.
Loading goes from the newest to the oldest and takes the first that is complete to the last bit.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ups.config import RunError, UsageError
from ups.files import sha256, written

FILES = ("state.safetensors", "state.json")


def named(accelerator, model, ema):
    """{name: tensor} of the weights and their averages, as they live."""
    model = accelerator.unwrap_model(model)
    tensors = {f"model/{name}": t for name, t in model.state_dict().items()}
    for kind, averages in (("ema", ema.shadow), ("best", ema.best)):
        tensors |= {f"{kind}/{name}": t for (name, _), t in
                    zip(model.named_parameters(), averages, strict=True)}
    return tensors


def gather_state(accelerator, model, optimizer, ema):
    """Name every tensor of the training state, whole on the main process. Every rank calls."""
    tensors = named(accelerator, model, ema)
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{key}": t for key, t in values.items()}
    return whole(accelerator, tensors)


def whole(accelerator, tensors):
    """Gather shards one by one (every rank takes part); only the main process keeps the copies."""
    kept = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if hasattr(tensor, "full_tensor"):  # a shard of FSDP2
            tensor = tensor.full_tensor()
        if accelerator.is_main_process:
            kept[name] = tensor.to("cpu", copy=True).contiguous()
    return kept


@torch.no_grad()
def restore_state(accelerator, tensors, groups, model, optimizer, ema):
    """Put the tensors of `gather_state` back into place, sharded as the live ones are."""
    def like(tensor, live):
        if hasattr(live, "full_tensor") and tensor.shape == live.shape:
            from torch.distributed.tensor import distribute_tensor  # takes a second to load

            return distribute_tensor(tensor.to(live.device), live.device_mesh, live.placements)
        return tensor

    lives = named(accelerator, model, ema)
    for name, live in lives.items():
        if name not in tensors or tensors[name].shape != live.shape:
            raise UsageError(f"the checkpoint has no such {name.partition('/')[2]}: another "
                             "version of the model wrote it; give another --run, or use the code "
                             "that wrote it.")
    for name, live in lives.items():
        live.copy_(like(tensors[name], live))
    params, state = [p for group in optimizer.param_groups for p in group["params"]], {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            _, index, key = name.split("/")
            state.setdefault(int(index), {})[key] = like(tensor, params[int(index)])
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if torch.is_tensor(rate):  # the one that the scheduler, and a CUDA graph, know
            group["lr"] = rate.fill_(group["lr"])


def write_checkpoint(folder, step, tensors, state, keep):
    """Write `folder/step_N` so that it is either complete or absent, then prune (main process)."""
    for stale in folder.glob("step_*.partial"):  # a save was killed, or the disk was full
        shutil.rmtree(stale)
    with written(folder / f"step_{step}") as partial:  # one that is there can only be damaged
        save_file(tensors, partial / "state.safetensors")
        (partial / "state.json").write_text(json.dumps(state, indent=1, default=float))
        manifest = {name: {"bytes": (partial / name).stat().st_size,
                           "sha256": sha256(partial / name)} for name in FILES}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
    done = [one for one in checkpoints(folder) if step_of(one) <= step]  # later ones are damaged
    for old in done[keep:]:
        shutil.rmtree(old)


def checkpoints(folder):
    """The checkpoints of a folder, newest first."""
    found = [path for path in Path(folder).glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder):
    return int(folder.name.removeprefix("step_"))


def damage(folder):
    """Say what is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if set(manifest) != set(FILES):  # never a path that a file names
            return "manifest.json is foreign"
        for name, expected in manifest.items():
            if (folder / name).stat().st_size != expected["bytes"]:
                return f"{name} has the wrong size"
            if sha256(folder / name) != expected["sha256"]:
                return f"{name} is not the file that was written"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def read_checkpoint(folder):
    """The tensors, memory-mapped, and the state of a checkpoint that `damage` found sound."""
    return load_file(folder / "state.safetensors"), json.loads((folder / "state.json").read_text())


def export_model(folder, tensors, config):
    """Write `model.safetensors` and `config.json`; replaces an earlier export as a whole."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    config = config | {"fingerprint": fingerprint(tensors, config)}
    try:
        with written(Path(folder)) as partial:
            save_file(tensors, partial / "model.safetensors")
            (partial / "config.json").write_text(json.dumps(config, indent=1))
    except (OSError, SafetensorError) as error:
        raise RunError(f"{folder} cannot be written ({error}); make room and run the same command "
                       "again.") from None


def load_model(folder):
    """`(config, tensors)` of an exported model whose fingerprint is right."""
    folder, fault = Path(folder), "weights and configuration do not belong together"
    try:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        if fingerprint(tensors, config) == config["fingerprint"]:
            return config, tensors
    except FileNotFoundError as error:
        name = Path(error.filename or "model.safetensors").name
        fault = f"no trained model here ({name} is missing)"
    except (ValueError, LookupError, SafetensorError) as error:
        fault = f"not readable ({error})"
    raise UsageError(f"{folder}: {fault}; put back a sound copy, or remove this folder and, where "
                     "there is one, the exit.json beside it, and run its stage again.")


def fingerprint(tensors, config):
    """sha256 over the configuration and every tensor: name, type, shape and bytes."""
    digest = hashlib.sha256()
    plain = {key: value for key, value in config.items() if key != "fingerprint"}
    digest.update(json.dumps(plain, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
