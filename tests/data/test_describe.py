"""`inspect` and `validate` on files that are odd, damaged or ragged."""

import json
import re

import by_hand
import h5py
import numpy as np
import pytest

from ups.config import UsageError
from ups.data.__main__ import main
from ups.data.find import open_fields
from ups.data.make import make
from ups.data.pdebench import open_pdebench
from ups.data.validate import validate


def refused(argv, words):
    with pytest.raises(UsageError, match=words) as caught:
        main([str(arg) for arg in argv])
    assert "\n" not in str(caught.value)


def test_darcy_is_described_by_its_solution_and_a_script_that_exists(published, capsys):
    path, u = published["darcy2d"]
    main(["inspect", str(path)])
    text = capsys.readouterr().out
    for c, name in enumerate("au"):  # u[:, 0] is the frame (a, 0): it would halve the mean of u
        v = u[:, 1, c].astype(float)
        assert (f"channel {name}       {v.min():.4g} to {v.max():.4g}, mean {v.mean():.4g}, "
                f"std {v.std():.4g} (of 6 trajectories)") in text
    assert "python train_steady.py --tasks darcy2d" in text


def test_columns_and_number(tmp_path, capsys):
    by_hand.build("ns2d", tmp_path / "a.h5", samples=1)
    main(["inspect", str(tmp_path / "a.h5")])
    text = capsys.readouterr().out
    assert "channel particles  -" in text and "1 trajectory of Vx" in text
    assert "(of 1 trajectory)" in text and "1 trajectories" not in text


def test_a_picture_never_replaces_data(tmp_path, capsys):
    path = tmp_path / "a.png"  # a name that the default picture would take
    by_hand.build("burgers1d", path)
    before = path.read_bytes()
    for flags in (["--plot"], ["--plot", tmp_path / "x" / ".." / "a.png"],
                  ["--plot", tmp_path / "b.hdf5"], ["--plot", tmp_path / "b"]):
        refused(["inspect", path, *flags], "--plot .* ends in .png, .pdf")
    assert path.read_bytes() == before
    (tmp_path / "text").write_text("")
    refused(["inspect", path, "--plot", tmp_path / "text" / "b.png"], "b.png cannot be written")
    refused(["inspect", tmp_path], "is a folder; give a file in it")


def test_odd_headers_are_one_sentence(tmp_path):
    def broken(task, words, change):
        path = tmp_path / f"{task}.h5"
        by_hand.build(task, path)
        with h5py.File(path, "r+") as f:
            change(f)
        refused(["inspect", path], f"{task}.h5: {words}")

    def text(f):
        del f["tensor"]
        f["tensor"] = np.full((2, 3, 4), b"high")

    def narrow(f):
        u = f["Vx"][:, :, :8]
        del f["Vx"]
        f["Vx"] = u

    def few(f):
        a = f["nu"][:3]
        del f["nu"]
        f["nu"] = a

    def one_component(f):
        u = f["velocity"][..., :1]
        del f["velocity"]
        f["velocity"] = u

    def logical(f):
        u = f["0000/data"][:] > 0
        del f["0000/data"]
        f["0000/data"] = u

    def no_frame(f):
        u = f["tensor"][:, :0]
        del f["tensor"], f["t-coordinate"]
        f["tensor"], f["t-coordinate"] = u, np.zeros(0)

    for beta in ("high", -0.1, np.nan, np.inf):
        broken("advection1d", f"the attribute beta of advection1d is .*{beta}.* not below 0",
               lambda f, beta=beta: f.attrs.update(beta=beta))
    for domain in ([[3, 1]], [[0, 1], [0, 1]], "foo", [[np.nan, 1]], [[-np.inf, 1]]):
        broken("burgers1d", "coordinates, or the attribute `domain`, are not .* for x: ",
               lambda f, domain=domain: f.attrs.update(boundary="periodic", domain=domain))
    broken("burgers1d", "coordinates, or the attribute", lambda f: f["x-coordinate"].write_direct(
        np.full(f["x-coordinate"].shape, np.nan, "f4")))
    broken("burgers1d", "6 samples of 0 frames need", no_frame)
    broken("ns2d", "velocity float32 .*, 1. do not hold numbers of one shape", one_component)
    broken("diffreact2d", "0000/data holds no real numbers, but bool", logical)
    broken("ns2d", "the header is damaged", lambda f: f.attrs.update(config="nu: [1, :"))
    broken("burgers1d", "tensor .* do not hold numbers of one shape", text)
    broken("cns1d", "density .* Vx .* do not hold numbers of one shape", narrow)
    broken("darcy2d", "nu .* do not hold numbers of one shape", few)


def test_validate_goes_on_after_a_file_that_cannot_be_opened(tmp_path, capsys):
    bad, good = tmp_path / "bad.hdf5", tmp_path / "good.hdf5"
    bad.write_text("text")
    by_hand.build("burgers1d", good)
    with h5py.File(good, "r+") as f:
        f["tensor"][2, 1, 0] = np.nan
    assert main(["validate", str(bad), str(good)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{bad}: not a readable HDF5 file")
    assert lines[1:] == [f"{good}: sample 2 holds NaN or Inf, first at frame 1."]
    refused(["validate", good, tmp_path / "none.h5"], "none.h5: there is no such file")


def test_space_must_be_evenly_spaced_and_described(tmp_path, capsys):
    path = tmp_path / "my file.hdf5"
    by_hand.build("burgers1d", path)
    assert validate([path]) == [] and main(["inspect", str(path)]) == 0
    assert f"--data '{path}' --run" in capsys.readouterr().out
    with h5py.File(path) as f:
        x = f["x-coordinate"][:]
    for wrong, words in ((x**2, "is not evenly spaced: interpolate the fields first"),
                         (x[:-2], f"has {len(x) - 2} coordinates for {len(x)} points")):
        with h5py.File(path, "r+") as f:
            del f["x-coordinate"]
            f["x-coordinate"] = wrong
        assert validate([path]) == [f"{path}: axis x {words}."]
        assert main(["inspect", str(path)]) == 0
        shown = capsys.readouterr().out
        assert words in shown and "spacing" not in shown


def test_a_file_that_is_too_short_to_train_on_says_so(tmp_path, capsys):
    make("diffreact2d", out=tmp_path, samples=4, grid=16, frames=5, t_end=0.5)
    main(["inspect", str(next(tmp_path.glob("*.h5")))])
    shown = capsys.readouterr().out
    assert "Too short to train on: that needs 12 frames." in shown and "Train on" not in shown


def test_validate_finds_ragged_files(tmp_path):
    path = tmp_path / "a.h5"
    by_hand.build("swe2d", path)
    assert validate([path]) == []
    with h5py.File(path, "r+") as f:
        longer = np.random.default_rng(9).normal(size=(7, 16, 8, 1)).astype("f4")
        del f["0002/data"], f["0004/grid/t"]
        f["0002/data"] = longer
        f["0003/grid/t"][4] = 2.5
    assert validate([path]) == [f"{path}: {fault}" for fault in (
        "sample 2 has shape (7, 16, 8, 1), the first (5, 16, 8, 1).",
        "sample 4 has no data or no times.", "sample 3 has other times than the first.")]
    by_hand.build("ns2d", path)
    with h5py.File(path, "r+") as f:
        f["t"][1, 3] = 9
    assert validate([path]) == [f"{path}: sample 1 has other times than the first."]


def test_a_domain_of_whole_numbers_is_one_of_floats(tmp_path):
    by_hand.build("burgers1d", tmp_path / "a.h5", boundary="periodic", domain=np.array([[0, 2]]))
    domain = open_pdebench(tmp_path / "a.h5").domain
    assert domain == ((0.0, 2.0),) and json.dumps(domain) == "[[0.0, 2.0]]"


def test_a_stray_tensor_beside_the_channels_is_not_read(tmp_path):
    path = tmp_path / "a.h5"
    u = by_hand.build("cns1d", path)
    with h5py.File(path, "r+") as f:
        f["tensor"] = np.zeros_like(f["density"])
    assert np.array_equal(open_pdebench(path).read([0]), u[:1])


def test_uneven_coordinates_are_told_and_not_trained_on(tmp_path, capsys):
    path = tmp_path / "a.h5"
    by_hand.build("burgers1d", path, samples=20)
    with h5py.File(path, "r+") as f:
        f["t-coordinate"][:] = np.logspace(-3, 0, len(f["t-coordinate"]))
    words = r"a.h5: axis t does not increase evenly from frame 0 to 1 \(0.001 to 0.00398.*\): inter"
    with pytest.raises(UsageError, match=words):
        open_fields("burgers1d", path)
    fault, = validate([path])
    assert re.search(words, fault)
    assert main(["inspect", str(path)]) == 0
    assert "; it does not increase evenly from frame 0" in capsys.readouterr().out


@pytest.mark.parametrize("change, words", [
    (lambda f: f["0002"].pop("data"), "samples 0 to 5 cannot be read .*data.*ups.data validate"),
    (lambda f: f.create_dataset("9999", data=1.0), "samples 0 to 6 cannot be read .*validate"),
    (lambda f: [f.copy("0001/data", "keep"), f["0001"].pop("data"),
                f["0001"].create_dataset("data", data=f["keep"][..., :1]), f.pop("keep")],
     "samples 0 to 5 cannot be read .*shape.*validate"),
    (lambda f: [f["0001"].pop("data"), f["0001"].update(data=np.ones((13, 2, 16, 8)))],
     "samples 0 to 5 cannot be read .*shape.*validate"),
])
def test_a_sample_that_is_not_as_the_others_is_one_sentence(tmp_path, change, words):
    path = tmp_path / "a.h5"
    by_hand.build("diffreact2d", path, frames=13)
    with h5py.File(path, "r+") as f:
        change(f)
    file = open_pdebench(path)
    with pytest.raises(UsageError, match=words):
        file.read(range(file.samples))
    failed = 0
    for row in range(file.samples):  # nor is it bent into shape where it is read alone
        try:
            file.read([row])
        except UsageError:
            failed += 1
    assert failed == 1
    assert re.search(r"sample \d+ (has|cannot)", validate([path])[0])


def test_a_sample_with_nan_is_named_in_any_split(tmp_path):
    path = tmp_path / "a.h5"
    by_hand.build("burgers1d", path, samples=20)
    with h5py.File(path, "r+") as f:
        f["tensor"][1, 2, 3] = np.nan
    fields = open_fields("burgers1d", path)
    assert 1 in fields.split("test")
    with pytest.raises(UsageError, match="a.h5: NaN or Inf in sample 1; .*ups.data validate"):
        fields.read(fields.split("test"))
    assert fields.read([0]).isfinite().all()


def test_a_broken_sample_does_not_keep_the_others_from_being_named(tmp_path):
    """Of cns1d the boundary is measured when the file is opened; the folder has brackets."""
    path = tmp_path / "data (old)" / "a.h5"
    path.parent.mkdir()
    by_hand.build("cns1d", path)
    by_hand.spoil(path, "Vx", 4)
    fault, = validate([path])
    assert re.fullmatch(rf"{re.escape(str(path))}: sample 4 cannot be read \(Can.t .*\)\.", fault)


def test_only_the_chosen_files_must_be_even(tmp_path):
    for nu in (0.01, 0.1):
        by_hand.build("burgers1d", tmp_path / f"{nu}.h5", samples=20, Nu=nu)
    with h5py.File(tmp_path / "0.1.h5", "r+") as f:
        f["t-coordinate"][2] += 0.1
    assert len(open_fields("burgers1d:nu=0.01", tmp_path)) == 20
    with pytest.raises(UsageError, match="0.1.h5: axis t does not increase evenly from frame 1"):
        open_fields("burgers1d:nu=0.1", tmp_path)
