"""Look after the latent caches.

    python -m ups.cache ls                                what is there, and which runs can read it
    python -m ups.cache build --run runs/NAME --task T --split S [--cache_dtype D] [--rebuild]
    python -m ups.cache verify [FOLDER ...]               read every byte; exit code 1 at a fault
    python -m ups.cache gc [--yes]                        remove what no codec in runs/ can read
"""

import glob
import json
import re
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ups.cache.store import open_cache, remove, verify
from ups.config import UsageError, command, parse
from ups.files import lock

# What `gc` takes for a cache, and all that it may hold, whole or half written.
CACHE = re.compile(r"\w+-\w+-[0-9a-f]{16}")
PART = re.compile(r"(manifest\.json|shard-\d+\.safetensors)(\.\d+\.partial)?")


@dataclass(frozen=True)
class Config:
    cache: str = "cache"  # folder of all caches
    runs: str = "runs"  # folder of all runs: their codecs say which caches can be read
    yes: bool = False  # gc: remove, do not only show
    # build: as in train_operator.py
    run: str = "runs/burgers1d"  # the run whose codec encodes
    task: str = "burgers1d"  # which data, as in burgers1d:nu=0.001,0.01
    split: str = "train"  # train, fit, val or test
    data: str = "data"  # folder of field files
    stride_x: int = 1  # keep every n-th grid point
    stride_t: int = 1  # keep every n-th frame
    codec: str = "patch"  # patch, or grid: the learned one of train_codec.py
    patch: int = 4  # grid points per token and axis
    components: str = "auto"  # numbers per patch: auto (by codec_error), all, or how many
    codec_error: float = 1e-4  # relative error that auto allows
    cache_dtype: str = "float32"  # float32, float16 or bfloat16
    rebuild: bool = False  # also where a cache is there

    @property
    def tasks(self):
        return (self.task,)


def ls(cfg, folders):
    """Print one line per cache and the total."""
    owners, total = _owners(cfg), 0
    for folder in folders:
        size = _size(folder)
        total += size
        print(f"{folder.name}  {size / 1e6:.1f} MB  {_describe(folder, owners)}")
    print(f"{len(folders)} caches, {total / 1e6:.1f} MB in {cfg.cache}/")


def build(cfg, folders):
    """Make data, codec and cache where they are missing; under `accelerate launch` by all ranks."""
    from ups.latents import check_codec, open_tasks
    from ups.train.ranks import make_accelerator

    check_codec(cfg)
    accelerator = make_accelerator()
    cache = open_tasks(accelerator, cfg, cfg.split)[0].cache
    if accelerator.is_main_process:
        print(f"{cache.folder}  {_size(cache.folder) / 1e6:.1f} MB  {_describe(cache.folder)}")
    accelerator.end_training()


def check(cfg, folders):
    """Read every byte of every cache; 1 at a fault."""
    faults = 0
    for folder in folders:
        found = verify(folder)
        faults += len(found)
        print("\n".join(found) or f"{folder}: every byte is as it was written.")
    return int(faults > 0)


def gc(cfg, folders):
    """Show, and with --yes remove, the caches that no codec can read and those left incomplete."""
    if not Path(cfg.runs).is_dir():
        raise UsageError(f"--runs {cfg.runs} is no folder: which caches can be read is not known.")
    owners, freed = _owners(cfg), 0
    if folders and not owners:
        raise UsageError(f"no codec at all below --runs {cfg.runs}, so nothing is removed; give "
                         "the folder of your runs, or delete caches by hand.")
    for folder in folders:
        if not _is_cache(folder):
            print(f"{folder.name}: is no cache, left alone")
            continue
        if _belongs(folder, owners):
            continue
        held = lock(folder.with_name(folder.name + ".lock"), "--cache")  # another may wait for it
        if held is None:
            print(f"{folder.name}: is being built, left alone")
            continue
        size = _size(folder)
        freed += size
        print(f"{folder.name}  {size / 1e6:.1f} MB  {_describe(folder, owners)}")
        if cfg.yes:
            remove(folder)
        held.close()
    print(f"{freed / 1e6:.1f} MB", "removed" if cfg.yes or not freed else "to remove: add --yes")


def _owners(cfg):
    """Fingerprint -> codec folders below runs/, at any depth and behind links, that have it."""
    owners = {}
    for name in sorted(glob.glob(f"{glob.escape(cfg.runs)}/**/codec/*/*/config.json",
                                 recursive=True, include_hidden=True)):
        try:
            fingerprint = json.loads(Path(name).read_text())["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{name} is damaged, so whose caches are whose is not known: repair "
                             "or delete it.") from None
        owners.setdefault(fingerprint, []).append(str(Path(name).parent.parent))
    return owners


def _is_cache(folder):
    """By its name and by all that is in it: nothing else is ever removed."""
    return (CACHE.fullmatch(folder.name) is not None and not folder.is_symlink()
            and all(PART.fullmatch(path.name) and path.is_file() for path in folder.iterdir()))


def _belongs(folder, owners):
    try:
        return owners.get(open_cache(folder).manifest["identity"]["codec"], [])
    except UsageError:
        return []


def _describe(folder, owners=None):
    try:
        cache = open_cache(folder)
    except UsageError as error:
        return str(error)
    fingerprint, shape = cache.manifest["identity"]["codec"], " x ".join(map(str, cache.shape))
    whose = ", ".join(owners.get(fingerprint, ["no run has it"])) if owners is not None else ""
    return (f"{cache.manifest['dtype']} {shape}  codec error {cache.error.mean():.2e}  "
            f"codec {fingerprint[:12]} {whose}")


def _size(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    commands = {"ls": ls, "build": build, "verify": check, "gc": gc}
    if not argv or argv[0] in ("-h", "--help"):
        argv = ["ls", "--help"]
    if argv[0] not in commands:
        raise UsageError(f"python -m ups.cache {argv[0]}: it is one of {', '.join(commands)}.")
    named = list(takewhile(lambda word: not word.startswith("-"), argv[1:]))
    if named and argv[0] != "verify":
        raise UsageError(f"python -m ups.cache {argv[0]} takes no folder ({named[0]}), it takes "
                         "all in --cache; see --help.")
    cfg = parse(Config, argv[1 + len(named):], __doc__)
    if argv[0] != "build" and not named and not Path(cfg.cache).is_dir():
        raise UsageError(f"--cache {cfg.cache}: there is no such folder.")
    folders = [Path(name) for name in named] or sorted(
        path for path in Path(cfg.cache).glob("*") if path.is_dir())
    return commands[argv[0]](cfg, folders)


if __name__ == "__main__":
    sys.argv[0] = "python -m ups.cache"  # the name that --help shows
    command(main)
