import by_hand
import h5py
import numpy as np
import pytest

from ups.config import UsageError
from ups.data.check import seam
from ups.data.fields import Fields
from ups.data.file import pieces
from ups.data.find import open_fields
from ups.data.pdebench import identify, open_pdebench

PARAMS = {"advection1d": {"beta": 0.4}, "burgers1d": {"nu": 0.01},
          "reacdiff1d": {"nu": 0.5, "rho": 2.0}, "diffsorp1d": {}, "darcy2d": {"beta": 1.0},
          "cns1d": {"eta": 0.01, "zeta": 0.02}, "swe2d": {}, "ns2d": {"nu": 0.01},
          "diffreact2d": {"Du": 1e-3, "Dv": 5e-3, "k": 5e-3},
          "cns2d": {"eta": 0.01, "zeta": 0.02, "M": 0.1},
          "cns3d": {"eta": 0.01, "zeta": 0.02, "M": 0.1}}


@pytest.mark.parametrize("task", by_hand.TASKS)
def test_every_layout_reads_exactly(published, task):
    path, u = published[task]
    assert identify(path) == (task, False)  # not by its name
    file = open_pdebench(path)
    facts = file.facts
    assert (file.samples, facts.frames, len(facts.channels), *facts.grid) == u.shape
    assert dict(zip(facts.params, file.params[-1], strict=True)) == pytest.approx(PARAMS[task])
    np.testing.assert_array_equal(file.read([4, 0, 1, 4]), u[[4, 0, 1, 4]])
    if task != "darcy2d":
        assert np.diff(file.times) == pytest.approx(0.5)
    lo, hi = (0, 1) if task in ("advection1d", "burgers1d", "reacdiff1d", "darcy2d", "ns2d") else (
        -1, 1)
    assert facts.domain == ((lo, hi),) * len(facts.grid)


def test_our_own_flow_in_the_published_layout_is_periodic(tmp_path):
    """A body force along x alone, which depends on y, and no walls."""
    by_hand.build("ns2d", tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "r+") as f:
        f.attrs["ups"] = '{"task": "ns2d"}'
    facts = open_pdebench(tmp_path / "a.h5").facts
    assert facts.boundary == ("periodic",) * 2 and facts.shifts == ("x",)
    assert facts.domain == ((0.0, 2 * np.pi),) * 2


@pytest.mark.parametrize("task", by_hand.TASKS)
def test_strides_and_frames_are_those_of_numpy(published, task):
    path, u = published[task]
    fields = open_fields(task, path, stride_x=2, stride_t=2)
    first = 10 if task == "diffreact2d" else 0
    part = u if task == "darcy2d" else u[:, first::2]
    part = part[(..., *[slice(None, None, 2)] * (u.ndim - 3))]
    assert fields.facts.dt == (1.0 if task == "darcy2d" else pytest.approx(1.0))
    assert (fields.facts.frames, fields.facts.grid) == (part.shape[1], part.shape[3:])
    np.testing.assert_array_equal(fields.read([5, 2, 3]), part[[5, 2, 3]])
    np.testing.assert_array_equal(fields.read([5], slice(1, 2)), part[[5], 1:2])


def test_pieces_cover_everything_once_and_stay_below_the_limit():
    for rows, frames, size, limit in ((10, 7, 8, 100), (10, 7, 8, 200), (3, 5, 50, 20)):
        seen = np.zeros((rows, frames), int)
        for i, k in pieces(rows, frames, size, limit):
            seen[i, k] += 1
            assert seen[i, k].size * size <= max(limit, size)
        assert (seen == 1).all()


def test_the_seam_tells_periodic_files_from_open_ones(tmp_path):
    x = (np.arange(64) + 0.5) / 64
    phase = np.random.default_rng(0).uniform(0, 6, (8, 3, 1))
    for shape, name in ((np.sin(2 * np.pi * x + phase), "periodic"),
                        (np.sin(4 * x + phase), "closed")):
        path = tmp_path / f"{name}.hdf5"
        by_hand.build("cns1d", path, samples=8, frames=3)
        with h5py.File(path, "r+") as f:
            for key in ("density", "pressure", "Vx"):
                del f[key]
                f[key] = shape.astype("f4")
            del f["x-coordinate"]
            f["x-coordinate"] = x
        file = open_pdebench(path)
        assert Fields([file]).facts.boundary == (name,)
        ratio, = seam(file)
        # By hand, from the same values: jumps and bends at the ends over those inside.
        v, rms = shape[:, 1:], lambda x: np.sqrt(np.mean(np.square(x), (1, 2)))
        jump = rms(v[..., :1] - v[..., -1:]) / rms(np.diff(v))
        bends = np.stack([v[..., -2] - 2 * v[..., -1] + v[..., 0],
                          v[..., -1] - 2 * v[..., 0] + v[..., 1]], -1)
        jump = np.maximum(jump, rms(bends) / rms(np.diff(v, n=2)))
        assert ratio == pytest.approx(np.quantile(jump, 0.75), rel=1e-3)


def test_bad_files_are_one_sentence(tmp_path):
    def says(path, words):
        with pytest.raises(UsageError, match=words):
            open_pdebench(path)

    says(tmp_path / "none.hdf5", "no such file")
    (tmp_path / "text.hdf5").write_text("not this" * 1000)
    says(tmp_path / "text.hdf5", "cannot be read")
    whole = tmp_path / "whole.hdf5"
    by_hand.build("burgers1d", whole)
    (tmp_path / "cut.hdf5").write_bytes(whole.read_bytes()[:1500])
    says(tmp_path / "cut.hdf5", "truncated")
    with h5py.File(tmp_path / "other.hdf5", "w") as f:
        f["images"] = np.zeros(3)
    says(tmp_path / "other.hdf5", "has not the layout of PDEBench, but images")
    by_hand.build("cns2d", tmp_path / "mach.hdf5")
    with h5py.File(tmp_path / "mach.hdf5", "r+") as f:
        del f.attrs["M"]
    says(tmp_path / "mach.hdf5", "parameter M must be a finite")
