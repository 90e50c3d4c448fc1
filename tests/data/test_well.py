"""The Well's files: a Rayleigh-Benard-like set by h5py alone, and those of the package itself."""

import pickle

import equations
import h5py
import numpy as np
import pytest

from ups.config import UsageError
from ups.data.well import open_well

X, Y = 6, 4


def write_well(path, samples=3, frames=5, alpha=-1.5, seed=0):
    """Write a file, periodic in x and with walls in y; return its fields by name."""
    random = np.random.default_rng(seed)
    b, mask, v, D = (random.normal(size=shape).astype("f4") for shape in (
        (samples, frames, X, Y), Y, (samples, frames, X, Y, 2), (samples, frames, X, Y, 2, 2)))
    mask = mask if alpha < 0 else mask[None]  # an axis that does not vary is absent, or one point
    drive = random.normal(size=frames).astype("f4")
    equations.write_well(
        path, "rayleigh_benard", "xy", np.tile(np.arange(frames) / 4, (samples, 1)),
        (np.arange(X) / X * 4, (np.arange(Y) + 0.5) / Y), ("periodic", "WALL"),
        ({"buoyancy": (b, True, True), "mask": (mask, False, False, False, True)},
         {"velocity": (v, True, True)}, {"D": (D, True, True)}),
        {"alpha": (np.full(samples, alpha), True, False), "Rayleigh": (1e10, False, False),
         "drive": (drive, False, True)})
    return {"buoyancy": b, "mask": mask, "velocity": v, "D": D, "drive": drive}


def test_a_folder_of_the_well(tmp_path):
    root = tmp_path / "rayleigh_benard"
    write_well(root / "data/train/a.hdf5", seed=1)
    want = write_well(root / "data/train/b.hdf5", samples=2, frames=7, alpha=0.5, seed=2)
    write_well(root / "data/valid/a.hdf5", seed=3)
    write_well(root / "data/test/a.hdf5", seed=4)
    assert len(open_well(root / "data")) == 4
    files = pickle.loads(pickle.dumps(open_well(root)))
    assert [file.split for file in files] == ["train", "train", "val", "test"]
    assert [file.facts.frames for file in files] == [5, 7, 5, 5]
    file, facts = files[1], files[1].facts
    assert facts.channels == ("buoyancy", "velocity_x", "velocity_y", "D_xx", "D_xy", "D_yx",
                              "D_yy")
    assert facts.inputs == ("mask", "drive") and facts.inputs_vary
    assert facts.boundary == ("periodic", "closed") and facts.grid == (X, Y) and facts.dt == 0.25
    np.testing.assert_allclose(facts.domain, [(-1 / 3, 4 - 1 / 3), (0, 1)], atol=1e-5)
    assert facts.params == ("alpha", "Rayleigh") and facts.name == "rayleigh_benard"
    np.testing.assert_array_equal(file.params, [[0.5, 1e10], [0.5, 1e10]])
    u = np.concatenate([want["buoyancy"][..., None], want["velocity"],
                        want["D"].reshape(2, 7, X, Y, 4)], -1)
    u = np.moveaxis(u, -1, 2)
    np.testing.assert_array_equal(file.read([1, 0]), u[[1, 0]])
    part = file.read([1], range(1, 7, 2), stride=2)
    np.testing.assert_array_equal(part, u[1:, 1::2, :, ::2, ::2])
    given = file.read_inputs([0, 1], range(2, 5))
    np.testing.assert_array_equal(given[:, :, 0], np.broadcast_to(want["mask"], (2, 3, X, Y)))
    np.testing.assert_array_equal(given[1, :, 1, 3, 2], want["drive"][2:5])
    assert open_well(root / "data/test/a.hdf5")[0].split == ""


def test_what_is_not_the_well(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["u"] = np.zeros((2, 3, 4))
    assert open_well(tmp_path / "a.h5") == open_well(tmp_path) == []
    write_well(tmp_path / "b.h5")
    with h5py.File(tmp_path / "b.h5", "a") as f:
        del f["t1_fields/velocity"]
        f["t1_fields/velocity"] = np.zeros((3, 5, X, Y))
        f["t1_fields/velocity"].attrs.update({"sample_varying": True, "time_varying": True})
    with pytest.raises(UsageError, match="velocity_x is t1_fields/velocity sample time x"):
        open_well(tmp_path / "b.h5")


@pytest.mark.filterwarnings("ignore")
def test_the_package_reads_the_same(tmp_path):
    datasets = pytest.importorskip("the_well.data.datasets")
    dummy = pytest.importorskip("the_well.utils.dummy_data")
    (tmp_path / "dummy").mkdir()
    dummy.write_dummy_data(tmp_path / "dummy/one.hdf5")
    write_well(tmp_path / "mine/one.hdf5", frames=10)
    with h5py.File(tmp_path / "mine/one.hdf5", "a") as f:  # its reader wants axes of one point
        mask = f["t0_fields/mask"]
        attributes, values = dict(mask.attrs), mask[:][None]
        del f["t0_fields/mask"]
        f["t0_fields/mask"] = values
        f["t0_fields/mask"].attrs.update(attributes)
    for name, boundary in (("dummy", ("periodic", "periodic")), ("mine", ("periodic", "closed"))):
        file, = open_well(tmp_path / name / "one.hdf5")
        theirs = datasets.WellDataset(path=str(tmp_path / name), n_steps_input=4, n_steps_output=1,
                                      use_normalization=False, return_grid=True)
        meta, facts = theirs.metadata, file.facts
        assert facts.boundary == boundary and facts.grid == tuple(meta.spatial_resolution)
        assert facts.channels == tuple(sum(meta.field_names.values(), []))
        constant = sum(meta.constant_field_names.values(), [])
        assert facts.inputs == (*constant, *meta.scalar_names)
        assert facts.params == tuple(meta.constant_scalar_names)
        for i in (0, len(theirs) - 1):
            row, start = divmod(i, theirs.n_windows_per_trajectory[0])
            item = theirs[i]
            u = np.concatenate([item["input_fields"], item["output_fields"]])
            span = range(start, start + 5)
            np.testing.assert_array_equal(file.read([row], span)[0], np.moveaxis(u, -1, 1))
            given = file.read_inputs([row], range(start, start + 4))[0]
            np.testing.assert_array_equal(
                given[0, :len(constant)], np.moveaxis(item["constant_fields"].numpy(), -1, 0))
            np.testing.assert_array_equal(given[:, len(constant):, 0, 0],
                                          item["input_scalars"].numpy().astype("f4"))
            np.testing.assert_array_equal(file.params[row].astype("f4"),
                                          item["constant_scalars"].numpy().astype("f4"))
            times = np.concatenate([item["input_time_grid"], item["output_time_grid"]])
            np.testing.assert_allclose(file.times[span] - file.times[start], times, atol=1e-6)
