import by_hand
import h5py
import numpy as np
import pytest

from ups.config import UsageError
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
    file = open_pdebench(path, task)
    facts = file.facts
    assert (file.samples, facts.frames, len(facts.channels), *facts.grid) == u.shape
    assert dict(zip(facts.params, file.params[-1], strict=True)) == pytest.approx(PARAMS[task])
    np.testing.assert_array_equal(file.read([4, 0, 1, 4]), u[[4, 0, 1, 4]])
    lo, hi = (0, 1) if task in ("advection1d", "burgers1d", "reacdiff1d", "darcy2d", "ns2d") else (
        -1, 1)
    assert facts.domain == ((lo, hi),) * len(facts.grid)

    fields = open_fields(task, path, stride_x=2, stride_t=2)
    first = 10 if task == "diffreact2d" else 0
    part = u if task == "darcy2d" else u[:, first::2]
    part = part[(..., *[slice(None, None, 2)] * (u.ndim - 3))]
    assert fields.facts.dt == pytest.approx(1.0)  # twice 0.5
    assert (fields.facts.frames, fields.facts.grid) == (part.shape[1], part.shape[3:])
    np.testing.assert_array_equal(fields.read([5, 2, 3]), part[[5, 2, 3]])
    np.testing.assert_array_equal(fields.read([5], slice(1, 2)), part[[5], 1:2])


def test_our_own_flow_in_the_published_layout_is_periodic(tmp_path):
    """A body force along x alone, which depends on y, and no walls."""
    by_hand.build("ns2d", tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "r+") as f:
        f.attrs["ups"] = '{"task": "ns2d"}'
    facts = open_pdebench(tmp_path / "a.h5", "ns2d").facts
    assert facts.boundary == ("periodic",) * 2 and facts.shifts == ("x",)
    assert facts.domain == ((0.0, 2 * np.pi),) * 2


def test_pieces_cover_everything_once_and_stay_below_the_limit():
    for rows, frames, size, limit in ((10, 7, 8, 100), (10, 7, 8, 200), (3, 5, 50, 20)):
        seen = np.zeros((rows, frames), int)
        for i, k in pieces(rows, frames, size, limit):
            seen[i, k] += 1
            assert seen[i, k].size * size <= max(limit, size)
        assert (seen == 1).all()


def _attribute(name, value):
    return lambda f: f.attrs.update({name: value})


def _replaced(name, change):
    def broken(f):
        values = change(f[name][:])
        del f[name]
        f[name] = values
    return broken


@pytest.mark.parametrize("task, words, broken", [
    ("advection1d", "could not convert string to float: 'high'", _attribute("beta", "high")),
    ("cns2d", "parameter M must be a finite number.* is .nan", _attribute("M", np.nan)),
    ("burgers1d", "u is tensor .* kind S", _replaced("tensor", lambda u: u.astype("S4"))),
    ("ns2d", "cannot be read", _attribute("config", "nu: [1, :")),
    ("cns1d", "Vx is .*(6, 5, 8).* 16 points", _replaced("Vx", lambda u: u[:, :, :8])),
    ("darcy2d", "a is nu .* over 6 samples", _replaced("nu", lambda a: a[:3]))])
def test_odd_headers_are_one_sentence(task, words, broken, tmp_path):
    path = tmp_path / f"{task}.h5"
    by_hand.build(task, path)
    with h5py.File(path, "r+") as f:
        broken(f)
    with pytest.raises(UsageError, match=f"{task}.h5.*{words}") as caught:
        open_pdebench(path, task)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_longer_whole(tmp_path):
    whole = tmp_path / "whole.hdf5"
    by_hand.build("burgers1d", whole)
    (tmp_path / "cut.hdf5").write_bytes(whole.read_bytes()[:1500])
    with pytest.raises(UsageError, match="cut.hdf5 cannot be read .*truncated"):
        identify(tmp_path / "cut.hdf5")
