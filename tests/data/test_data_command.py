import multiprocessing
import os
import resource
import signal
import time

import h5py
import numpy as np
import pytest
import torch

from ups.config import UsageError, command
from ups.data import make as making
from ups.data.__main__ import main
from ups.data.find import NoData, find, open_fields
from ups.data.pdebench import identify
from ups.data.solvers import SOLVERS

TINY = ["--samples", "8", "--grid", "16", "--frames", "13"]


def refused(argv, words):
    with pytest.raises(UsageError, match=words):
        main([str(arg) for arg in argv])


def forked(argv, main=main):
    """A process of its own, without the seconds of an import."""
    process = multiprocessing.get_context("fork").Process(
        target=lambda: command(lambda: main(argv)), daemon=True)
    process.start()
    return process


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One folder with the data of every bundled solver, at two viscosities of Burgers."""
    folder = tmp_path_factory.mktemp("made")
    for task in SOLVERS:
        main(["make", task, *(TINY[:4] if task == "darcy2d" else TINY), "--out", str(folder)])
    main(["make", "burgers1d", *TINY, "--nu", "0.1", "1", "--out", str(folder)])
    main(["make", "diffreact2d", *TINY, "--Du", "2e-3", "--out", str(folder)])
    return folder


@pytest.mark.parametrize("task", SOLVERS)
def test_made_data_hold_what_the_solver_gives(task, made, capsys):
    fields, solver = open_fields(task, made), SOLVERS[task]
    file = fields.files[0]
    assert identify(file.path) == (task, True) and fields.facts.equation
    assert main(["inspect", str(file.path)]) == 0
    text = capsys.readouterr().out
    assert f": {task}\n" in text and "axis x          16 points" in text
    assert f"launch train_{'steady' if task == 'darcy2d' else 'operator'}.py --data" in text

    job = making.settings_of(file.path)
    params = {key: job[key] for key in solver.PARAMS}
    u, more = making._solve_bundled(job, params, torch.device("cpu"), 0)
    np.testing.assert_array_equal(file.read(range(8)), u)
    assert file.params[0].tolist() == list(params.values())
    if task == "darcy2d":
        np.testing.assert_array_equal(file.read_inputs(range(8))[:, 0, 0], more["a"])
        assert not u[:, 0].any()
    else:
        assert fields.facts.dt == pytest.approx(job["t_end"] / 12)
    walls = task in ("darcy2d", "diffreact2d", "swe2d")
    assert {*fields.facts.boundary} == {"closed" if walls else "periodic"}
    assert fields.facts.shifts == {"ns2d": ("x",)}.get(task, () if walls else ("x",))
    assert fields.facts.first_frame == (10 if task == "diffreact2d" else 0)


def test_the_published_darcy_is_a_slice_in_time(tmp_path, made):
    """The same coefficients, and u(1.75) from a random start instead of the steady field."""
    assert SOLVERS["darcy2d"].PRESETS["pdebench"]["target"] == "slice"
    main(["make", "darcy2d", *TINY[:4], "--target", "slice", "--out", str(tmp_path)])
    (u, a), (v, b) = ((one.read(range(8))[:, 1], one.inputs(range(8)))
                      for one in (open_fields("darcy2d", root) for root in (made, tmp_path)))
    assert torch.equal(a, b) and 0.005 < (u - v).norm() / u.norm() < 0.1
    assert main(["validate", str(tmp_path)]) == 0
    refused(["make", "darcy2d", "--target", "late"], "invalid choice: 'late'")


def test_values_make_files_that_share_initial_conditions(made):
    fields = open_fields("burgers1d:nu=0.1,1", made)
    assert [f.path.name for f in fields.files] == ["burgers1d_nu0.1.h5", "burgers1d_nu1.0.h5"]
    u = fields.read(range(16))
    assert torch.equal(u[:8, 0], u[8:, 0]) and not torch.equal(u[:8, -1], u[8:, -1])
    assert torch.equal(u[:8, 0], open_fields("advection1d", made).read(range(8))[:, 0])
    assert fields.split("test").tolist() == [0, 8]  # the first tenth, as published
    fields = open_fields("diffreact2d", made)
    assert fields.params([0, 8]).tolist() == [[0.001, 0.005, 0.005], [0.002, 0.005, 0.005]]
    assert fields.split("test").tolist() == [7, 15]  # the last


def test_a_second_run_skips_and_other_settings_are_refused(tmp_path, capsys):
    argv, path = ["make", "burgers1d", *TINY, "--out", tmp_path], tmp_path / "burgers1d_nu0.01.h5"
    main([str(word) for word in argv])
    before, path = path.read_bytes(), path.rename(tmp_path / "other.hdf5")  # whatever its name
    main([str(word) for word in argv])
    assert "is complete" in capsys.readouterr().out
    refused([*argv, "--seed", 1], r"other settings \(seed=0\)")
    refused([*argv, "--frames", 5], r"other settings \(frames=13\)")
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]
    (tmp_path / "burgers1d_nu0.2.h5").write_text("")
    refused([*argv, "--nu", 0.2], "not ours")


def test_a_sample_does_not_depend_on_the_number_of_samples(tmp_path):
    for samples in (5, 7):
        making.make("advection1d", out=tmp_path / str(samples), samples=samples, grid=16, frames=3,
                    chunk=4)
    few, many = (open_fields("advection1d", tmp_path / one).read(range(5)) for one in "57")
    assert torch.equal(few, many)
    assert not torch.equal(few[0], few[4])  # another chunk, another generator


def test_data_are_made_for_the_default_folder_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SOLVERS["burgers1d"].PRESETS, "small",
                        {"samples": 8, "grid": 16, "frames": 3, "t_end": 0.1, "chunk": 8})
    for root in ("elsewhere", "data"):
        with pytest.raises(NoData, match=f"make burgers1d --out {root}"):
            find((root,), ("burgers1d",))
    (file,), = find((), ("burgers1d:nu=0.2",), make=True).values()
    assert (file.samples, file.facts.frames, file.params[0].item()) == (8, 3, 0.2)
    said = "data has no burgers1d: the small preset of the bundled solver is made there.\n"
    assert said in capsys.readouterr().err
    find((), ("burgers1d:nu=0.2",), make=True)
    assert capsys.readouterr().err == ""
    with pytest.raises(NoData, match="download"):
        find((), ("cns1d",), make=True)


OWN = """
import numpy as np
{torch}
FACTS = dict(channels="u", boundary="periodic", dt=0.1, conserved="u", domain="0 2")

def solve(generator, n, waves=1, lag=0.0, mask=None):
    phase = {draw}
    u = np.sin(np.pi * (waves * np.arange(16) / 8 + phase + np.arange(5)[:, None] - lag))
    return u, {{"p": phase[:, 0, 0]}}
"""


@pytest.mark.parametrize("torch, draw", [
    ("", "generator.random((n, 1, 1))"),
    ("import torch", "torch.rand((n, 1, 1), generator=generator).numpy()")])
def test_a_solver_of_ones_own(tmp_path, torch, draw, capsys):
    solver = tmp_path / "waves.py"
    solver.write_text(OWN.format(torch=torch, draw=draw))
    read = []
    for samples in (20, 9):  # another number of chunks and processes
        main(["make", str(solver), "--samples", str(samples), "--out", str(tmp_path / f"{samples}"),
              "--chunk", "8", "--lag", "-0.5"])
        (file,), = find((tmp_path / f"{samples}",)).values()
        assert (file.samples, file.facts.frames, file.facts.params) == (samples, 5, ("p",))
        assert (file.facts.name, file.facts.conserved, file.facts.dt) == ("waves", ("u",), 0.1)
        read.append(file.read(range(9)))
        np.testing.assert_allclose(read[-1][:, 0, 0, 0], np.cos(np.pi * file.params[:9, 0]),
                                   rtol=1e-5)
    np.testing.assert_array_equal(*read)
    assert len(np.unique(read[0][:, 0, 0, 0])) == 9
    capsys.readouterr()
    again = ["make", solver, "--samples", 9, "--out", tmp_path / "9", "--chunk", 8, "--lag", -0.5]
    main([str(word) for word in again])
    assert "is complete" in capsys.readouterr().out
    for old, new, words in (("(waves *", "n * (n / 0 + waves *", "division"),
                            ("np.sin(", "np.nan * (", "is not finite"),
                            ("def solve", "def run", "has no function solve"),
                            ("phase[:, 0, 0]", "phase[:3, 0, 0]", r"returned p of shape \(3,\)"),
                            ("return u,", "return None,", r"returned trajectories of shape \(\)"),
                            ("np.arange(5)[:", "np.arange(n)[:", "is there with other")):
        solver.write_text(OWN.replace(old, new).format(torch=torch, draw=draw))
        making._load.cache_clear()
        with pytest.raises(Exception, match=words):
            main([str(word) for word in again[:5]] + [
                str(tmp_path / ("9" if "other" in words else "new"))])
    assert not list(tmp_path.rglob("new/*"))
    solver.write_text(OWN.replace("0, 0]", '0, 0], "a": u[:, 0]').format(torch=torch, draw=draw))
    making._load.cache_clear()
    main([*map(str, again[:4]), "--out", str(tmp_path / "given"), "--chunk", "8"])
    (file,), = find((tmp_path / "given",)).values()  # more than a number of each is an input
    np.testing.assert_array_equal(file.read_inputs(range(9))[:, 0], file.read(range(9))[:, 0])
    solver.write_text(OWN.format(torch=torch, draw=draw))
    making._load.cache_clear()
    refused(["make", solver, "--grid", 16], "has no setting grid; it has chunk, lag, mask, samples")
    refused(["make", solver, "--preset", "small"], "has no setting preset")
    refused(["make", tmp_path / "none.py"], "there is no file .*none.py")


def test_wrong_use_is_one_sentence_and_writes_nothing(tmp_path, monkeypatch):
    out = ["--out", tmp_path / "data"]
    refused(["make", "heat1d", *out], "no solver for heat1d; there are advection1d")
    refused(["make", "burgers1d", "--preset", "huge", *out], "no preset huge; there are small")
    refused(["make", "burgers1d", "--beta", 1, *out], "setting beta; it has chunk, frames")
    for flags, words in (
            ("--nuu 1", "burgers1d has no setting nuu; it has chunk, frames"),
            ("--frames 1", "--frames 1 is out of range; .* at least 2"),
            ("--chunk 0", "at least 1"), ("--grid 15", "at least 16"),
            ("--grid 16.5", "--grid: invalid int value: '16.5'"), ("--grid 16 32", "setting 32"),
            ("--nu", "expected at least one"), ("--nu 1 inf", "out of range; it must be finite"),
            ("--nu low", "invalid float value: 'low'"), ("--t_end 0 --samples 4", "uneven"),
            ("--nu -9 --samples 4", "not finite"), ("a b", "has no setting a")):
        refused(["make", "burgers1d", *flags.split(), *out], words)
    (tmp_path / "text").write_text("")
    for name in ("text", "text/data"):
        refused(["make", "burgers1d", *TINY, "--out", tmp_path / name], "cannot be written")
    refused(["make", "burgers1d", "--device", "gpu", *out], "device.*gpu")
    refused(["inspect", tmp_path / "none.h5"], "no such file")
    assert main(["validate", str(tmp_path / "none.h5")]) == 1
    refused([], "required")
    monkeypatch.setattr(SOLVERS["burgers1d"], "solve", lambda u0, *a, **k: u0[:, None] / 0)
    refused(["make", "burgers1d", "--samples", 4, "--grid", 16, "--frames", 2, *out], "not finite")
    assert not list(tmp_path.rglob("*.*5*"))


def test_a_full_disk_is_one_sentence(tmp_path, capfd):
    def limited(argv):
        resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))
        main(argv)

    argv = ["make", "burgers1d", *TINY[2:], "--samples", "800", "--out", str(tmp_path)]
    run = forked(argv, limited)
    run.join(60)
    error = capfd.readouterr().err
    assert run.exitcode == 2 and "Traceback" not in error, error
    assert error.splitlines()[-1].startswith(
        f"error: {tmp_path}/burgers1d_nu0.01.h5 cannot be written (")
    assert not list(tmp_path.iterdir())


def test_a_killed_run_leaves_nothing_that_opens_and_the_next_one_finishes(tmp_path):
    run = forked(["make", "advection1d", "--grid", "1024", "--chunk", "16", "--samples", "100000",
                  "--frames", "5", "--out", str(tmp_path)])
    partial, deadline = tmp_path / "advection1d_beta0.1.h5.partial", time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(run.pid, signal.SIGKILL)
    run.join(60)
    assert run.exitcode == -signal.SIGKILL and list(tmp_path.iterdir()) == [partial]
    with pytest.raises(NoData):
        open_fields("advection1d", tmp_path)
    refused(["inspect", partial], "cannot be read|is neither HDF5")
    main(["make", "advection1d", *TINY, "--out", str(tmp_path)])
    assert len(open_fields("advection1d", tmp_path)) == 8 and not partial.exists()


def test_two_makers_at_once_leave_a_sound_file(tmp_path, monkeypatch):
    argv = ["make", "advection1d", "--samples", "4", "--grid", "16", "--chunk", "2", "--out"]
    main([*argv, str(tmp_path / "b")])
    real, times = making._solve_bundled, []

    def meanwhile(*args):
        times.append(0)
        if len(times) == 2:  # the file is created and half written
            refused([*argv, tmp_path / "a"], "is being written by another process; wait for it.")
        return real(*args)

    monkeypatch.setattr(making, "_solve_bundled", meanwhile)
    main([*argv, str(tmp_path / "a")])
    a, b = (next((tmp_path / one).iterdir()).read_bytes() for one in "ab")
    assert a == b and len(times) == 3
    with h5py.File(next((tmp_path / "a").iterdir())) as f:
        assert f["u"].shape == (4, 41, 16)
