"""The latent cache: trajectories encoded once, read by memory map.

    cache/TASK-SPLIT-KEY/shard-00000.safetensors    "z" (n, T, N, D), "inputs" (n, T or 1, N, E)
                                                    where data have such; the header has KEY/0
                                                    and "z_error" (n,), one per trajectory
                         manifest.json              written last: without it there is no cache
    cache/TASK-SPLIT-KEY.lock                       empty; locked by a launch while it builds

KEY hashes all that the numbers depend on: task, indices of the split, strides, first frame, dtype,
fingerprint of the codec, digest of the data. The manifest holds those, shapes, parameters, size and
sha256 of each shard, and the codec's error per trajectory. Trajectory i lies in shard i // count.
Neither that nor the batches of an encoder depend on the number of processes, so neither do bytes.

The codec's error is the nRMSE of decode(z) with z as it is stored: the mean over frames and
channels of |p - u| / |u|, norms over space; a channel that is zero in a whole frame is left out.
"""

import hashlib
import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ups.config import UsageError
from ups.data.facts import from_plain
from ups.files import sha256, write_bytes
from ups.relative_error import relative_error
from ups.train.ranks import everyone, on_main, take_lock, together

VERSION = 1
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SHARD_BYTES = 2**28  # what a rank holds in memory, twice, while it writes a shard


class Cache:
    """An open cache: `z` and `inputs` hold one memory-mapped tensor (n, T, N, D) per shard."""

    def __init__(self, folder, manifest, z, inputs=()):
        self.folder, self.manifest, self.z, self.inputs = folder, manifest, z, inputs
        self.shape = tuple(manifest["shape"])  # (trajectories, T, N, D)
        self.facts = from_plain(manifest["facts"])
        self.params = torch.tensor(manifest["params"], dtype=torch.float64).view(self.shape[0], -1)
        self.error = torch.tensor(manifest["error"])


def build_cache(accelerator, codec, fields, split, root="cache", dtype="float32", fingerprint=""):
    """Encode a split with every rank's device, unless that is done already, and open the result."""
    if dtype not in DTYPES:
        raise UsageError(f"--codec.dtype {dtype}: it is one of {', '.join(DTYPES)}.")
    name, indices = fields.facts.name, fields.split(split)
    identity = {
        "task": name, "split": split, "indices": _sha256(_json(indices.tolist())),
        "stride_x": fields.stride_x, "stride_t": fields.frames.step,
        "first_frame": fields.frames.start, "dtype": dtype, "codec": fingerprint,
        "data": fields.digest, "version": VERSION,
    }
    key = _sha256(_json(identity))[:16]
    folder = Path(root).absolute() / f"{name}-{split}-{key}"
    complete = (folder / "manifest.json").exists
    if not on_main(accelerator, complete):  # one that is may be read-only
        lock = take_lock(accelerator, folder.with_name(folder.name + ".lock"), "--cache")
        try:
            if not on_main(accelerator, complete):  # another launch may have built it
                _build(accelerator, codec, fields, indices, folder, identity, key)
        finally:
            if lock:
                lock.close()
    return together(accelerator, open_cache, folder, key)


def _build(accelerator, codec, fields, indices, folder, identity, key):
    """Write this rank's shards, every one of them whole; the main process adds the manifest.

    A build that was stopped goes on: a shard that bears the key is there already.
    """
    facts = fields.facts
    shape = (len(indices), facts.frames, math.prod(codec.tokens), codec.width)
    dtype = DTYPES[identity["dtype"]]
    count = max(1, SHARD_BYTES // (math.prod(shape[1:]) * dtype.itemsize))
    shards = list(enumerate(indices.split(count)))
    mine = shards[accelerator.process_index::accelerator.num_processes]

    def clear():
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob("*.partial"):
            partial.unlink()

    def write():
        codec.to(accelerator.device).eval()
        return [write_shard(shard, part) for shard, part in mine]

    def write_shard(shard, part):
        path, mark = folder / _name(shard), f"{key}/{shard}"
        if (error := _error_in(path, mark, len(part))) is not None:
            about = {"bytes": path.stat().st_size, "sha256": sha256(path)}
            return shard, about, error.tolist()
        z, error = _encode(codec, fields.stream(part), (len(part), *shape[1:]), dtype,
                           accelerator.device)
        if not (finite := z.isfinite().flatten(1).all(1)).all():
            raise UsageError(f"{facts.name} trajectory {part[finite.int().argmin()]} has no "
                             f"finite latents in {identity['dtype']}; --codec.dtype float32 has "
                             "the widest range, and `python -m ups.data validate` finds NaN.")
        tensors = {"z": z, "z_error": error}
        if facts.inputs:  # exact, whatever the dtype of the latents
            given = [codec.encode_inputs(v.to(accelerator.device)).cpu()
                     for v in fields.stream(part, inputs=True)]
            tensors["inputs"] = torch.cat(given).unflatten(0, (len(part), -1))
        data = save(tensors, {"key": mark})  # two entries would come in any order; hashed as made
        _write(path, data)
        return shard, {"bytes": len(data), "sha256": _sha256(data)}, error.tolist()

    def seal(written):
        body = {
            "key": key, "identity": identity, "facts": facts.plain(), "shape": shape,
            "indices": indices.tolist(), "params": fields.params(indices).tolist(),
            "error": [float(f"{error:.6g}") for *_, errors in written for error in errors],
            "shards": [about for _, about, _ in written],
        }
        _write(folder / "manifest.json", _json(body | {"checksum": _sha256(_json(body))}))

    on_main(accelerator, clear)
    parts = everyone(accelerator, together(accelerator, write))
    on_main(accelerator, seal, sorted(itertools.chain(*parts)))  # by shard


def _error_in(path, mark, count):
    """The codec's error of each trajectory in a shard of an earlier build; None: it has no such."""
    try:
        with safe_open(path, framework="pt") as file:
            error = file.get_tensor("z_error")
            return error if file.metadata()["key"] == mark and len(error) == count else None
    except (OSError, SafetensorError, TypeError, KeyError):
        return None


@torch.no_grad()
def _encode(codec, batches, shape, dtype, device):
    """Latents (n, T, N, D) of the stream of u (B, C, *grid), on the CPU, and the error (n,)."""
    z = torch.empty(shape, dtype=dtype)  # on the CPU: no other tensor can be saved
    rows, errors = z.flatten(0, 1), []
    with ThreadPoolExecutor(1) as pool:  # reads the next batch while one is encoded
        waiting = pool.submit(next, batches, None)
        while (u := waiting.result()) is not None:
            waiting = pool.submit(next, batches, None)
            now, rows = rows[:len(u)], rows[len(u):]
            u = u.to(device)
            now.copy_(codec.encode(u))
            errors.append(relative_error(codec.decode(now.to(device, u.dtype)), u).cpu())
    errors = torch.cat(errors).view(len(z), -1)  # (n, T * C)
    return z, errors.nansum(1) / (~errors.isnan()).sum(1).clamp(min=1)


def open_cache(folder, key=None):
    """Map a complete cache after checks of manifest, sizes and headers; wrong ones are named."""
    folder = Path(folder)

    def refuse(name, what):
        return UsageError(f"{folder / name} {what}: delete {folder}, and it is built again.")

    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        whole = manifest.pop("checksum") == _sha256(_json(manifest))
    except FileNotFoundError:
        raise UsageError(f"{folder} is no complete cache, it has no manifest.") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        whole = False
    if not whole or manifest["identity"]["version"] != VERSION:
        raise refuse("manifest.json", f"is damaged, or of another version than {VERSION}")
    if key not in (None, manifest["key"]):
        raise refuse("manifest.json", "belongs to another codec or data")

    z, inputs = [], []
    for i, shard in enumerate(manifest["shards"]):
        path = folder / _name(i)
        if (size := path.stat().st_size if path.exists() else 0) != shard["bytes"]:
            raise refuse(path.name, f"has {size} bytes instead of {shard['bytes']}")
        try:
            with safe_open(path, framework="pt") as file:
                found, tensor = file.metadata(), file.get_tensor("z")
                if manifest["facts"]["inputs"]:
                    inputs.append(file.get_tensor("inputs"))
        except Exception as error:  # of the format: safetensors has its own type
            raise refuse(path.name, f"is damaged ({error})") from None
        if (found or {}).get("key") != f"{manifest['key']}/{i}":
            raise refuse(path.name, "belongs to another codec or data")
        z.append(tensor)
    return Cache(folder, manifest, z, inputs)


def verify(folder):
    """Read every byte; return one sentence per fault."""
    try:
        shards = open_cache(folder).manifest["shards"]
    except UsageError as error:
        return [str(error)]
    return [f"{folder / _name(i)} has changed since it was written: delete {folder}, and it is "
            "built again." for i, shard in enumerate(shards)
            if sha256(folder / _name(i)) != shard["sha256"]]


def _write(path, data):
    try:
        write_bytes(path, data)
    except OSError as error:
        raise UsageError(f"{path} ({len(data) / 1e6:.1f} MB) cannot be written ({error.strerror}): "
                         "make room, or choose another folder with --cache.") from error


def _name(shard):
    return f"shard-{shard:05d}.safetensors"


def _json(values):
    return json.dumps(values, sort_keys=True).encode()


def _sha256(data):
    return hashlib.sha256(data).hexdigest()
