"""A frozen dataclass becomes the command line.

    cfg = parse(Config)                      # --lr 1e-4 --model.dim 256 --config runs/x/config.json

Flags win over `--config FILE` (JSON or YAML of an earlier run), which wins over the defaults. The
comment behind a field in the source is its help text. An unknown key is an error that names the
nearest one.
"""

import argparse
import dataclasses
import difflib
import errno
import functools
import gc
import inspect
import locale
import math
import os
import re
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import yaml

DISK = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES  # full, or not ours to write


class RunError(Exception):
    """An end that is no bug: one sentence, cause and cure, without a traceback; exit code 1."""

    code = 1
    told = False  # whether another process says it


class UsageError(RunError):
    """Wrong use, found by every process alike; exit code 2."""

    code = 2


class Stopped(RunError):
    """A signal asked the run to stop, and it has."""

    code = 143


def command(main):
    """Run `main()` as a command: an end that is no bug is one sentence, printed once."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        if "utf" not in (encoding := locale.getpreferredencoding(False).lower()):
            raise UsageError(f"files and names would be read as {encoding}; `export PYTHONUTF8=1`, "
                             "then run again.")
        code = main()
    except SystemExit as end:  # a stopped run, a dry run, --help
        code = end.code
    except (RunError, FloatingPointError) as error:  # a loss that is no number is so on every rank
        code = getattr(error, "code", 1)
        if not getattr(error, "told", False) and (first or type(error) is RunError):
            below = "" if first else "\n"  # the main process's progress bar
            word = "error: " * (not isinstance(error, Stopped))
            print(f"{below}{word}{error}", file=sys.stderr)
    except BrokenPipeError:  # `| head`; what is still to be written would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print("stopped: what read the output has ended.", file=sys.stderr)
        code = 1
    except OSError as error:
        if error.errno not in DISK:
            raise
        print(f"error: {error}; make room there, or write to another folder.", file=sys.stderr)
        code = 1
    except KeyboardInterrupt as error:
        if first:
            print(f"{error}" or "stopped", "run the same command again to go on.", sep="; ",
                  file=sys.stderr)
        code = 130
    gc.collect()  # process groups join their threads, one of which could else abort the exit
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """Wrong flags are wrong use; no abbreviations; the description as it is written."""

    def __init__(self, **options):
        wide = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=32,
                                 width=110)
        super().__init__(allow_abbrev=False, formatter_class=wide, **options)

    def error(self, message):
        raise UsageError(f"{message.rstrip('.')}. See --help.")


def parse(cls, argv=None, description=None):
    """Build `cls` from the command line; `description` (a script's docstring) opens `--help`."""
    fields = dict(_fields(cls))
    parser = Parser(description=description, argument_default=argparse.SUPPRESS,
                    usage="%(prog)s [--flag value ..]")
    parser.add_argument("--config", metavar="FILE", help="JSON or YAML with values of flags")
    sections = dict.fromkeys(section for _, _, section, _ in fields.values())
    groups = {title: parser.add_argument_group(title) for title in
              sorted(sections, key=lambda title: title == "run")}  # science first
    for name, (kind, default, section, comment) in fields.items():
        kind, many = _plain(kind)
        shown = " ".join(map(str, default)) if many else default
        how = ({"action": argparse.BooleanOptionalAction} if kind is bool else
               {"type": kind, "nargs": "+" if many else None, "metavar": kind.__name__.upper()})
        groups[section].add_argument(
            f"--{name}", help=f"{comment} [{shown}]".strip().replace("%", "%%"), **how)
    args, unknown = parser.parse_known_args(argv)
    if unknown and not unknown[0].startswith("-"):
        raise UsageError(f"{unknown[0]!r} belongs to no flag. See --help.")
    if unknown:
        raise UsageError(_unknown(unknown[0].split("=")[0].lstrip("-"), fields, "--"))
    flags = vars(args)
    path = flags.pop("config", None)
    values = read_config(path) if path else {}
    if wrong := [key for key in values if key not in fields]:
        raise UsageError(f"{path}: {_unknown(wrong[0], fields)}")
    return build(cls, _size(cls, values) | values | _size(cls, flags) | flags)


def _size(cls, given):
    """The fields that `size` stands for in a class with SIZES; single ones win over it."""
    if not hasattr(cls, "SIZES") or "size" not in given:
        return {}
    if given["size"] not in cls.SIZES:
        raise UsageError(f"--size {given['size']}: it is one of {', '.join(cls.SIZES)}.")
    return cls.SIZES[given["size"]]


def read_config(path):
    """Read a JSON or YAML mapping as a flat dictionary; nested mappings become dotted names."""
    try:
        values = yaml.safe_load(Path(path).read_text())  # JSON is YAML
    except FileNotFoundError:
        raise UsageError(f"--config {path}: there is no such file.") from None
    except Exception as error:  # not UTF-8, or not YAML
        why = " ".join(str(error).split())
        raise UsageError(f"--config {path}: not a readable JSON or YAML file ({why}).") from None
    if not isinstance(values, dict):
        raise UsageError(f"--config {path}: expected a mapping of field names to values.")
    return _dotted(values)


def check(cfg, **bounds):
    """Refuse fields outside their bounds (least, most), and what is no number."""
    for name, (least, most) in bounds.items():
        values = getattr(cfg, name)
        for value in values if isinstance(values, tuple) else (values,):
            if not least <= value <= most:
                limits = f"at least {least}" if most == math.inf else f"between {least} and {most}"
                raise UsageError(f"--{name} must be {limits}, not {value}.")


def build(cls, values):
    """Make `cls` from a flat dictionary with dotted names, such as `flat` gives."""
    arguments = {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            prefix = field.name + "."
            inner = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
            try:
                arguments[field.name] = build(field.type, flat(field.default) | inner)
            except (ValueError, UsageError) as error:  # a model's own check of its sizes
                raise UsageError(f"--{prefix}{str(error).removeprefix('--')}") from None
        elif field.name in values:
            arguments[field.name] = _cast(field, values[field.name])
    return cls(**arguments)


def flat(cfg):
    """`{"lr": 1e-3, "model.dim": 64}`: the dotted names of the command line, ready for JSON."""
    return {key: list(value) if isinstance(value, tuple) else value
            for key, value in _dotted(dataclasses.asdict(cfg)).items()}


def nested(values):
    """`{"lr": 1e-3, "model.dim": 64}` as an object with .lr and .model.dim."""
    top = SimpleNamespace()
    for key, value in values.items():
        place, (*path, last) = top, key.split(".")
        for name in path:
            place = vars(place).setdefault(name, SimpleNamespace())
        setattr(place, last, value)
    return top


def _dotted(values, prefix=""):
    out = {}
    for key, value in values.items():
        inner = isinstance(value, dict)
        out |= _dotted(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return out


def _fields(cls, prefix="", chosen=None, inside=None):
    """Yield (dotted name, (type, default, section, comment)) for every leaf field.

    `chosen` is an instance where a class holds one as its own default, in the section `inside`.
    The section is the `# word` above a field, the comment stands behind it in the source.
    """
    described, section = {}, ""
    for base in reversed(cls.__mro__[:-1]):
        for line in inspect.getsource(base).splitlines():
            if match := re.match(r"    # (\w+)", line):
                section = match[1]
            elif match := re.match(r"    (\w+): [^#]*(?:# (.+))?", line):
                described[match[1]] = section, match[2] or ""
    for field in dataclasses.fields(cls):
        default = getattr(chosen, field.name, field.default)
        section, comment = described.get(field.name, ("", ""))
        if dataclasses.is_dataclass(field.type):
            yield from _fields(field.type, f"{prefix}{field.name}.", default, section)
        else:
            yield prefix + field.name, (field.type, default, inside or section or "flags", comment)


def _plain(kind):
    """`tuple[str, ...]` -> (str, True); `int` -> (int, False)."""
    many = typing.get_origin(kind) is tuple
    return (typing.get_args(kind)[0] if many else kind), many


def _cast(field, value):
    kind, many = _plain(field.type)
    values = value if many and isinstance(value, list | tuple) else [value]
    try:
        cast = tuple(map(kind, values))
        if any(isinstance(old, bool) != (kind is bool) or kind is int and new != float(old)
               for old, new in zip(values, cast, strict=True)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{field.name}: expected {kind.__name__}, got {value!r}.") from None
    return cast if many else cast[0]


def _unknown(key, fields, dash=""):
    near = difflib.get_close_matches(key, fields, n=1, cutoff=0.0)
    return f"there is no field {dash}{key}; the nearest is {dash}{near[0]} (--help lists all)."
