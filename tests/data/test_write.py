"""What is written reads back: fields, parameters, inputs and every fact."""

import h5py
import numpy as np
import pytest
from test_well import write_well

from ups.config import UsageError
from ups.data import write_fields
from ups.data.__main__ import main
from ups.data.arrays import open_array, open_folder
from ups.data.pdebench import open_pdebench
from ups.data.well import open_well
from ups.data.write import convert, copy

FACTS = {"name": "flow", "equation": "c_t + v . grad c = nu lap c", "dt": 0.25,
         "boundary": "periodic closed", "domain": ((0.0, 2.0), (-1.0, 1.0)),
         "conserved": "c", "positive": "c", "mirrors": "x: vx; y: vy", "shifts": "x",
         "linear": True, "first_frame": 2}
N, T, GRID = 3, 5, (6, 4)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def test_every_fact_reads_back(tmp_path):
    u, a, force = noise(N, T, 3, *GRID), noise(N, *GRID, seed=1), noise(T, *GRID, seed=2)
    path = write_fields(tmp_path / "mine.h5", u, channels="c vx vy", axes="x y",
                        params={"nu": [0.1, -0.2, 0.3], "rho": 2.0}, inputs={"a": a, "f": force},
                        **FACTS)
    file = open_array(path)
    np.testing.assert_array_equal(file.read([2, 0]), u[[2, 0]])
    inputs = file.read_inputs(range(N))
    np.testing.assert_array_equal(inputs[:, :, 0], np.broadcast_to(a[:, None], (N, T, *GRID)))
    np.testing.assert_array_equal(inputs[:, :, 1], np.broadcast_to(force, (N, T, *GRID)))
    np.testing.assert_array_equal(file.params, [[0.1, 2], [-0.2, 2], [0.3, 2]])
    np.testing.assert_array_equal(file.times, np.arange(T) * 0.25)
    facts = file.facts.plain()
    expected = FACTS | {
        "boundary": ("periodic", "closed"), "channels": ("c", "vx", "vy"), "inputs": ("a", "f"),
        "inputs_vary": True, "conserved": ("c",), "positive": ("c",),
        "mirrors": (("x", ("vx",)), ("y", ("vy",))), "shifts": ("x",), "axes": ("x", "y"),
        "grid": GRID, "frames": T, "params": ("nu", "rho"), "scales": (), "steady": False}
    assert facts == expected
    with h5py.File(path) as f:  # as netCDF-4 wants it
        assert all(np.ndim(value) < 2 for value in f.attrs.values())
    assert file.warnings == ()
    (tmp_path / "again").mkdir()
    again, = map(open_array, convert(path, tmp_path / "again"))  # into a folder that is there
    assert again.facts == file.facts
    np.testing.assert_array_equal(again.read(range(N)), u)
    np.testing.assert_array_equal(again.read_inputs(range(N)), inputs)
    np.testing.assert_array_equal(again.params, file.params)


def test_a_number_said_beside_the_file_is_one_more_parameter(tmp_path):
    path = write_fields(tmp_path / "mine.h5", noise(N, T, 8), params={"nu": 0.5})
    path.with_suffix(".yaml").write_text("mu: -3\n")
    file = open_array(path, said={"k": 2})
    assert (file.facts.params, file.params[0].tolist()) == (("nu", "mu", "k"), [0.5, -3, 2])


def test_trajectories_one_after_another(tmp_path):
    u, a = noise(N, T, 2, *GRID), noise(N, *GRID, seed=1)
    rows = ((u[i], {"a": a[i], "nu": i - 1.0}) for i in range(N))
    file = open_array(write_fields(tmp_path / "mine.h5", rows, boundary="closed closed",
                                   t=np.linspace(3, 4, T)))
    np.testing.assert_array_equal(file.read(range(N)), u)
    np.testing.assert_array_equal(file.read_inputs(range(N)), a[:, None, None])
    np.testing.assert_array_equal(file.params, [[-1], [0], [1]])
    assert file.facts.dt == 0.25 and file.facts.inputs_vary is False and file.samples == N
    same = open_array(write_fields(tmp_path / "same.h5", u[:, :N], channels="v w", inputs={
        "a": a[:, None], "f": a[None]}))  # as many frames as samples
    np.testing.assert_array_equal(same.read_inputs([0])[0], np.stack([a[[0] * N], a], 1))
    plain = open_array(write_fields(tmp_path / "plain.h5", iter(u[:, :, 0, :, 0]), x=np.arange(6)))
    np.testing.assert_array_equal(plain.read(range(N)), u[:, :, :1, :, 0])
    assert plain.facts.domain == ((-0.5, 5.5),) and plain.facts.channels == ("u",)


@pytest.mark.parametrize("change, said", [
    ({"axes": None}, "channel axis or none"),
    ({"axes": "x y z"}, "a channel axis or none"),
    ({"conserved": "energy"}, "conserved names 'energy'"),
    ({"boundary": "periodic"}, "boundary is ('periodic',); say it for each of the axes x y"),
    ({"boundry": "x"}, "neither a fact nor a number; the nearest fact is boundary"),
    ({"params": {"nu": [1, 2]}}, "nu has shape (2,) for 3 samples"),
    ({"params": {"u": 1.0, "x": [1, 2, 3]}}, "names two things"),
    ({"channels": ["wind x"]}, "'wind x' names two things, or has a blank or"),
    ({"t": [0, 1, 2, 4, 8]}, "uneven, with steps from 1 to 4"),
    ({"dt": -1}, "dt = -1 is not understood"),
    ({"t": np.arange(T - 1)}, "t has 4 coordinates for 5 frames"),
    ({"path": "mine.npz"}, "this writes HDF5; let the name end in .h5"),
    ({"inputs": {"a": noise(4, 6)}}, "input a has shape (4, 6)"),
    ({"axes": None, "boundary": "closed"}, "a channel axis or none"),
    ({"u": noise(N, T, 2, 8), "channels": "v v", "axes": "x"}, "two channels are called 'v'"),
    ({"u": noise(N, 2, 8), "channels": "v w", "axes": "x"}, "(2, 8), (times, 1 of space)"),
    ({"u": noise(N, T, 8).astype(object), "axes": "x"}, "are object, and no real numbers"),
    ({"channels": ["a/b"]}, "or a slash in it"),
    ({"params": noise(N)}, "params have no names"), ({"inputs": noise(*GRID)}, "inputs have no"),
    ({"t": np.zeros((N, T))}, "all trajectories share their times"),
    ({"u": noise(T, T, *GRID), "inputs": {"a": noise(T, *GRID)}}, "where (5 or 1, 5 or 1, 6, 4)")])
def test_what_cannot_be_written(tmp_path, change, said):
    how = {"path": "mine.h5", "u": noise(N, T, *GRID), "axes": "x y"} | change
    with pytest.raises(UsageError) as error:
        write_fields(tmp_path / how.pop("path"), how.pop("u"), **how)
    assert said in str(error.value) and "partial" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_what_is_masked_is_missing(tmp_path):
    u = np.ma.masked_greater(noise(N, T, 8), 1)
    path = write_fields(tmp_path / "mine.h5", u, inputs={"a": u[:, 0]})
    with h5py.File(path) as f:
        np.testing.assert_array_equal(np.isnan(f["u"]), u.mask)
        np.testing.assert_array_equal(np.isnan(f["a"]), u.mask[:, 0])


def test_a_file_is_whole_or_absent(tmp_path):
    path = write_fields(tmp_path / "mine.h5", noise(N, T, 8))

    def broken():
        yield noise(T, 8)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_fields(path, broken())
    for said, words in (({"boundary": "wall"}, "names 'wall'"), ({"t": [3] * T}, "uneven")):
        with pytest.raises(UsageError, match=words):  # before the generator goes on
            write_fields(path, broken(), **said)
    with pytest.raises(UsageError, match="trajectory 1 has shape"):
        write_fields(path, iter([noise(T, 8), noise(T, 6)]))
    assert [one.name for one in tmp_path.iterdir()] == ["mine.h5"] and open_array(path).samples == N


def test_a_compressed_npz_is_unpacked(tmp_path):
    u = noise(N, T, 8).astype("f8")
    np.savez_compressed(tmp_path / "mine.npz", u=u, nu=0.1)
    (tmp_path / "mine.yaml").write_text("dt: 0.5\n")
    with pytest.raises(UsageError, match="convert"):
        open_array(tmp_path / "mine.npz", "sample time x")
    main(["convert", str(tmp_path / "mine.npz"), str(tmp_path / "mine.h5"), "--axes",
          "sample time x"])
    file = open_array(tmp_path / "mine.h5")
    np.testing.assert_array_equal(file.read(range(N))[:, :, 0], u.astype("f4"))
    assert (file.facts.name, file.facts.dt, file.facts.params) == ("mine", 0.5, ("nu",))
    with h5py.File(file.path) as f:
        assert f["u"].dims[1][0].name == "/t" and f["t"].is_scale
    again, = convert(tmp_path / "mine.npz", f"{tmp_path}/new/", "sample time x")  # a slash: into it
    assert again == tmp_path / "new" / "mine.h5" and open_array(again).facts == file.facts


def test_published_files_are_converted(tmp_path, published):
    for split, seed in (("train", 1), ("valid", 2), ("test", 3)):
        write_well(tmp_path / "well/data" / split / "a.hdf5", seed=seed)
    with pytest.raises(UsageError, match="has 3 files; name a folder"):
        convert(tmp_path / "well", tmp_path / "own.h5")
    convert(tmp_path / "well", tmp_path / "own")
    darcy = open_pdebench(published["darcy2d"][0], "darcy2d")
    copy(darcy, tmp_path / "darcy.h5")
    pairs = [*zip(open_well(tmp_path / "well"), open_folder(tmp_path / "own"), strict=True),
             (darcy, open_array(tmp_path / "darcy.h5"))]
    for file, own in pairs:
        assert own.split == file.split
        assert own.facts.plain() == file.facts.plain() | {"name": own.facts.name}
        np.testing.assert_array_equal(own.read([1, 0]), file.read([1, 0]))
        np.testing.assert_array_equal(own.read_inputs([1, 0]), file.read_inputs([1, 0]))
        np.testing.assert_array_equal(own.params, file.params)
