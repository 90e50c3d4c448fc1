"""`inspect` says what training would see; `validate` names what no training should see."""

import re
from types import SimpleNamespace

import by_hand
import h5py
import numpy as np
import pytest

from ups.config import UsageError
from ups.data import write_fields
from ups.data.__main__ import main
from ups.data.describe import validate
from ups.data.find import open_fields
from ups.data.pdebench import open_pdebench


def refused(argv, words):
    with pytest.raises(UsageError, match=words) as caught:
        main([str(arg) for arg in argv])
    assert "\n" not in str(caught.value)


def faults(*paths, **said):
    return validate(SimpleNamespace(**{"data": paths, "tasks": (), "axes": "", "facts": ""} | said))


@pytest.fixture(scope="module")
def swirl(tmp_path_factory):
    """u in 2-D, periodic in x alone, of zero mean, pushed by an input; k is negative or not."""
    path = tmp_path_factory.mktemp("swirl") / "swirl.h5"
    rng = np.random.default_rng(0)
    u = rng.normal(size=(40, 5, 12, 16)).astype("f4")
    u -= u.mean((2, 3), keepdims=True)
    write_fields(path, u, dt=0.25, channels="u", axes="x y", boundary="periodic closed",
                 params={"k": np.linspace(-1, 3, 40)}, inputs={"push": rng.random((12, 16))},
                 equation="u_t = push")
    return path, u


def test_inspect_says_what_training_would_see(swirl, capsys, monkeypatch, tmp_path):
    path, u = swirl
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/swirl").mkdir(parents=True)
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    rows = open_fields("swirl", path).split("train").numpy()
    v = u[rows].astype(float)
    for words in (
            "equation        u_t = push", "parameters      k = -0.897436 to 3",
            "40 in 1 file: train 32, fit 2, val 2, test 4", "5 frames, t = 0 to 1, dt = 0.25",
            "axis x          12 points in (0, 1), spacing 0.0833333, periodic: the jump across",
            "axis y          16 points in (0, 1), spacing 0.0625, closed",
            f"channel u       {v.min():.4g} to {v.max():.4g}, mean ", f"std {v.std():.4g} (of 32 ",
            "input push      0.", "is used         shifts along x",
            "is constant to", "add conserved = u?",
            f"accelerate launch train_operator.py --data {path} --run runs/swirl_2"):
        assert words in text, words


def test_inspect_says_what_is_wrong_before_any_training(swirl, capsys, tmp_path):
    facts = tmp_path / "facts.yaml"
    facts.write_text("positive: u\nboundary: periodic periodic\n")
    assert main(["inspect", str(swirl[0]), "--facts", str(facts)]) == 0
    text = capsys.readouterr().out
    assert "WRONG           u is said to be positive, but falls to -" in text
    assert "Correct that first" in text and "accelerate" not in text
    fault, = faults(swirl[0], facts=str(facts))
    assert "u is said to be positive, but falls to -" in fault


def test_a_picture_never_replaces_data(tmp_path):
    path = tmp_path / "line.h5"
    write_fields(path, np.random.default_rng(0).normal(size=(5, 4, 2, 16)), boundary="closed")
    before = path.read_bytes()
    for png in (path, tmp_path / "b.hdf5", tmp_path / "b"):
        refused(["inspect", path, "--plot", png], "--plot .* ends in .png")
    assert main(["inspect", str(path), "--plot"]) == 0
    assert path.with_suffix(".png").stat().st_size > 10_000 and path.read_bytes() == before


def test_uneven_frames_and_misfit_coordinates(tmp_path, capsys):
    path, words = tmp_path / "a.h5", "frames are uneven, with steps from 0.00298107 to 0.188093"
    by_hand.build("burgers1d", path, samples=20)
    with h5py.File(path, "r+") as f:
        coordinates = f.pop("x-coordinate")[:-2]
        f["x-coordinate"] = coordinates
    faults(path, tasks=("burgers1d",))
    assert "coordinates x (14,) are passed over: it has 16 points" in capsys.readouterr().err
    with h5py.File(path, "r+") as f:
        f["t-coordinate"][...] = np.logspace(-3, 0, by_hand.T + 1)
    refused(["inspect", path, "--tasks", "burgers1d"], words)
    fault, = faults(path, tasks=("burgers1d",))
    assert words in fault


def test_validate_goes_on_after_a_file_that_cannot_be_opened(tmp_path, capsys):
    bad, good = tmp_path / "bad.hdf5", tmp_path / "good.h5"
    bad.write_text("text")
    u = np.random.default_rng(0).normal(size=(20, 4, 2, 16))
    u[2, 1, 0, :8] = u[5, 1, 1, 3] = np.inf
    write_fields(good, u, boundary="closed")
    assert main(["validate", str(bad), str(good)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{bad} cannot be read (")
    assert second == (f"{good}: NaN or Inf in 2 of 20 samples (2, 5), in 6.25 % of the values of "
                      "the first, not always at the same points: leave those samples out.")
    u[...] = 1.0
    u[..., 4:8] = np.nan
    write_fields(good, u, boundary="closed")
    assert faults(good) == [
        f"{good}: NaN or Inf in 20 of 20 samples (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..), in 25 % of "
        "the values of the first, always at the same points: fill them, and add a channel that "
        "marks them to `inputs`."]
    assert "none.h5: there is no such file" in faults(tmp_path / "none.h5")[0]


def test_unreadable_samples_do_not_keep_the_others_from_being_named(tmp_path):
    """In a folder with brackets; one sample has another shape, one a bad block."""
    path = tmp_path / "data (old)" / "a.h5"
    path.parent.mkdir()
    by_hand.build("cns1d", path, samples=20)
    by_hand.spoil(path, "Vx", 4)
    fault, = faults(path, tasks=("cns1d",))
    assert re.fullmatch(rf"{re.escape(str(path))}: sample 4 cannot be read \(Can.t .*\)\.", fault)
    by_hand.build("diffreact2d", path, samples=20, frames=13)
    with h5py.File(path, "r+") as f:
        del f["0003/data"], f["0005/data"]
        f["0005/data"] = np.ones((13, 2, 16, 8))
    found = faults(path, tasks=("diffreact2d",))
    assert [fault.split(": ")[1].split(" (")[0] for fault in found] == [
        "sample 3 cannot be read", "sample 5 cannot be read"]
    with pytest.raises(UsageError, match="a.h5 cannot be read .*object 'data' doesn't exist"):
        open_pdebench(path, "diffreact2d").read(range(20))
