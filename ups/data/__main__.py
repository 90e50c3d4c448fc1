"""Make, inspect, validate and convert data sets.

    python -m ups.data make burgers1d --preset small
    python -m ups.data inspect mine.npz --axes "sample time x" --plot
    python -m ups.data validate data/*.hdf5
    python -m ups.data convert mine.npz mine.h5 --axes "sample time x"
"""

import argparse
import shlex

from ups.config import Parser, UsageError, command

MAKE = """Solve a PDE of PDEBench, or run a solver of your own, and write what it gives.

    python -m ups.data make burgers1d --nu 0.001 0.01 0.1                  one file per value
    python -m ups.data make darcy2d --preset pdebench --device cuda --out /scratch/data
    python -m ups.data make ns2d --forcing stochastic --truth 512
    python -m ups.data make my_solver.py --samples 500 --out data/mine     docs/data.md

Run it again and it skips the files that are complete. Every other flag sets the solver:

    --samples 500   trajectories            --chunk 50     samples solved at once
    --grid 128      points per axis         --t_end 2      last time
    --frames 41     stored times            --nu 0.1       a parameter; several values: a file each

and the arguments of your own `solve` that have a default. Samples x grid x frames of the presets,
and the default parameters (small burgers1d and ns2d: nu = 0.01):

"""


def parser():
    from ups.data.solvers import SOLVERS

    presets = ""
    for task, solver in SOLVERS.items():
        sizes = ", ".join(f"{name} {p['samples']} x {p['grid']} x {p.get('frames', 1)}"
                          for name, p in solver.PRESETS.items())
        params = " ".join(f"{key}={value:g}" for key, value in solver.PARAMS.items())
        presets += f"    {task:13s}{sizes}; {params or 'no parameters'}\n"

    top = Parser(prog="python -m ups.data", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    make = commands.add_parser("make", description=MAKE + presets, help="solve and write",
                               argument_default=argparse.SUPPRESS,
                               usage="%(prog)s TASK [--flag value ..]")
    make.add_argument("task", help="one of those above, or a Python file")
    make.add_argument("--preset", help="small (default), medium or pdebench: the published size")
    make.add_argument("--out", help="folder for the files [data]")
    make.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    make.add_argument("--seed", type=int, help="of the initial conditions [0]")
    make.add_argument("--truth", type=int, help="stochastic ns2d: how often the solver continues "
                      "each of 16 test states")
    make.add_argument("--target", choices=("steady", "slice"),
                      help="darcy2d: the steady u, or the published one, at t = 1.75 of a march")
    make.add_argument("--forcing", choices=("constant", "stochastic"),
                      help="ns2d: stochastic is white noise in time; --grid is then what is kept")

    inspect = commands.add_parser("inspect", help="data in words", description="Say what data "
                                  "hold, whether they agree with what is said of them, what else "
                                  "could be said, and how to train on them.")
    inspect.add_argument("--plot", metavar="PNG", nargs="?", const="",
                         help="also draw a few trajectories [FILE with .png]")
    validate = commands.add_parser("validate", help="find faults", description="Read data whole "
                                   "and tell every fault; exit code 1 if there is one.")
    convert = commands.add_parser("convert", help="write own HDF5",
                                  description="Write data as the project's own HDF5.")
    for which in (inspect, validate):
        which.add_argument("data", nargs="+", metavar="DATA", help="files or folders")
    convert.add_argument("source", metavar="IN", help="file or folder")
    convert.add_argument("target", metavar="OUT", help="file; a folder where IN has several files")
    for which in (inspect, validate, convert):
        which.add_argument("--axes", default="", help="names of an array's axes, as stored")
        which.add_argument("--facts", default="", help="YAML file with what is true of the data")
        which.add_argument("--tasks", nargs="+", default=(), help="which data sets, or what a "
                              "file is that could be two things")
    return top


def main(argv=None):
    args, rest = parser().parse_known_args(argv)
    if rest and args.command != "make":
        raise UsageError(f"unknown arguments: {' '.join(rest)}. See --help.")
    if args.command == "make":
        from ups.data.make import make

        flags = {key: value for key, value in vars(args).items() if key != "command"}
        for path in make(words=rest, **flags):
            print(f"{path}: see python -m ups.data inspect {shlex.quote(str(path))}")
    elif args.command == "convert":
        from ups.data.find import read_facts
        from ups.data.write import convert

        print(*convert(args.source, args.target, args.axes, read_facts(args.facts), args.tasks),
              sep="\n")
    elif args.command == "inspect":
        from ups.data.describe import inspect

        inspect(args, args.plot)
    else:
        from ups.data.describe import validate

        faults = validate(args)
        print("\n".join(faults) or "All of it was read: no fault found.")
        return int(bool(faults))
    return 0


if __name__ == "__main__":
    command(main)
