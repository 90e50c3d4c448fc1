"""Look after the latent caches.

    python -m ups.cache ls                          what is there, and which runs can read it
    python -m ups.cache verify                      read every byte; exit code 1 at a fault
    python -m ups.cache gc [--yes]                  remove what no codec in --runs can read
"""

import glob
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from ups.cache.store import open_cache, verify
from ups.config import UsageError, command, parse
from ups.files import lock, read_json

COMMANDS = "ls", "verify", "gc"
# What `gc` takes for a cache: its name and all that is in it, whole or half written.
CACHE = re.compile(r"\w+-\w+-[0-9a-f]{16}")
PART = re.compile(r"(manifest\.json|shard-\d+\.safetensors)(\.\d+\.partial)?")


@dataclass(frozen=True)
class Config:
    cache: str = "cache"   # folder of all caches
    runs: str = "runs"     # folder of all runs: their codecs say which caches can be read
    yes: bool = False      # gc: remove, do not only show


def gc(cfg, folders, owners):
    """Show, and with --yes remove, the caches that no codec can read and those left incomplete."""
    if folders and not owners:
        raise UsageError(f"no codec at all below --runs {cfg.runs}, so nothing is removed; give "
                         "the folder of your runs, or delete caches by hand.")
    found = 0
    for folder in folders:
        readers, line = look(folder, owners)
        if not CACHE.fullmatch(folder.name) or folder.is_symlink() or not all(
                PART.fullmatch(path.name) and path.is_file() for path in folder.iterdir()):
            print(f"{folder.name}: is no cache, left alone")
        elif not readers:
            held = lock(folder.with_name(folder.name + ".lock"), "--cache")
            print(line if held else f"{folder.name}: is being built, left alone")
            found += held is not None
            if held and cfg.yes:  # the manifest first: what a kill leaves behind is incomplete
                (folder / "manifest.json").unlink(missing_ok=True)
                shutil.rmtree(folder)
            if held:
                held.close()
    print("every cache has its codec" if not found else
          "removed" if cfg.yes else "to remove what is listed here, add --yes")


def owners_in(runs):
    """Fingerprint -> codec folders below runs/, at any depth and behind links, that have it."""
    owners = {}
    for name in sorted(glob.glob(f"{glob.escape(runs)}/**/codec/*/*/config.json", recursive=True,
                                 include_hidden=True)):
        fingerprint = read_json(Path(name)).get("fingerprint")
        owners.setdefault(fingerprint, []).append(str(Path(name).parent.parent))
    return owners


def look(folder, owners):
    """The codecs that can read a cache, and a line about it."""
    size = f"{folder.name}  {_size(folder) / 1e6:.1f} MB "
    try:
        cache = open_cache(folder)
    except UsageError as error:
        return [], f"{size} {error}"
    identity = cache.manifest["identity"]
    readers, shape = owners.get(identity["codec"], []), " x ".join(map(str, cache.shape))
    return readers, (f"{size} {identity['dtype']} {shape}  codec error {cache.error.mean():.2e}  "
                     f"{', '.join(readers) or 'no run has its codec'}")


def _size(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def main(argv=None):
    name, *argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name not in (*COMMANDS, "-h", "--help"):
        raise UsageError(f"python -m ups.cache {name}: it is one of {', '.join(COMMANDS)}.")
    cfg = parse(Config, argv if name in COMMANDS else ["--help"], __doc__)
    if not Path(cfg.cache).is_dir():
        raise UsageError(f"--cache {cfg.cache}: there is no such folder.")
    folders = sorted(path for path in Path(cfg.cache).glob("*") if path.is_dir())
    if name == "verify":
        faults = [fault for folder in folders for fault in verify(folder)]
        print("\n".join(faults) or f"{len(folders)} caches: every byte is as it was written.")
        return int(bool(faults))
    owners = owners_in(cfg.runs)
    if name == "gc":
        return gc(cfg, folders, owners)
    print(*(look(folder, owners)[1] for folder in folders),
          f"{len(folders)} cache{'s' * (len(folders) != 1)}, "
          f"{sum(map(_size, folders)) / 1e6:.1f} MB in {cfg.cache}/",
          sep="\n")


if __name__ == "__main__":
    sys.argv[0] = "python -m ups.cache"  # the name that --help shows
    command(main)
