"""Arrays with named axes, in every file that they come in, by h5py and numpy alone."""

import dataclasses
import pickle
import sys

import h5py
import numpy as np
import pytest
import yaml
from equations import hdf5

from ups.config import UsageError
from ups.data import write_fields
from ups.data.arrays import open_array, open_folder
from ups.data.facts import MEASURED, READ, Facts, understand
from ups.data.stores import Unrecognised

N, T, X, Y = 4, 5, 6, 3
CENTRES = (np.arange(X) + 0.5) / X * 2


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def test_named_axes_in_any_order(tmp_path):
    u, v, a = noise(N, T, X, Y), noise(N, T, X, Y, seed=1), noise(X, Y, seed=2)
    path = hdf5(tmp_path / "mine.nc", {
        "u": ("y x time batch", u.transpose()),
        "v": ("batch time x y", v.astype(">f8")), "a": ("x y", a),
        "nu": ("batch", np.array([0.1, -1, 2, 3])), "lines": ("nv", np.zeros(2)),
        "edges": ("time nv", np.zeros((T, 2)))},
        {"time": np.arange(T) * 0.5, "x": CENTRES, "y": np.array([-1.0, 0, 1]),
         "batch": np.arange(N)},
        boundary="periodic closed", rho=np.array([2.5]), title="a run", note=np.array([1.0, 2.0]))
    file = pickle.loads(pickle.dumps(open_array(path)))
    facts = file.facts
    assert facts.axes == ("y", "x") and facts.grid == (Y, X)  # as the largest array has them
    got = file.read([3, 1, 2], range(1, 5, 2), stride=2)
    want = np.stack([u, v], 2).swapaxes(3, 4)[[3, 1, 2]][:, 1:5:2, :, ::2, ::2]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(file.read_inputs([0, 1])[:, 0, 0], [a.T, a.T])
    np.testing.assert_array_equal(file.params, [[2.5, 0.1], [2.5, -1], [2.5, 2], [2.5, 3]])
    assert facts.params == ("rho", "nu") and facts.boundary == ("periodic", "closed")
    assert facts.domain == ((-1.5, 1.5), (0.0, 2.0)) and facts.dt == 0.5 and facts.frames == T
    assert facts.channels == ("u", "v") and facts.inputs == ("a",) and not facts.inputs_vary
    assert [one.split()[0] for one in file.warnings] == ["edges", "lines", "a"]


@pytest.mark.parametrize("dims", ["attribute", "labels"])
def test_axes_by_attribute_or_label(tmp_path, dims):
    u = noise(N, T, 2, X).astype("f2")
    with h5py.File(tmp_path / "mine.h5", "w") as f:
        f["u"], f["t"], f["x"] = u, np.arange(T + 1) * 0.1, CENTRES.astype("f4")
        f["nu"] = np.arange(N)  # its one axis can only be that of samples
        if dims == "attribute":
            f["u"].attrs["dims"] = "sample time channel x"
            f["u"].attrs["channels"] = ["h", "hu"]
        else:
            for k, axis in enumerate(("sample", "t", "channels", "x")):
                f["u"].dims[k].label = axis
            f.attrs["channels"] = "h hu"
    file = open_array(tmp_path / "mine.h5")
    np.testing.assert_array_equal(file.read(range(N)), u.astype("f4"))
    assert file.facts.channels == ("h", "hu") and file.facts.domain == ((0.0, 2.0),)
    assert file.facts.params == ("nu",) and file.facts.boundary == ("",)
    assert file.facts.dt == pytest.approx(0.1) and file.warnings == ()


def test_coordinates_of_axes_that_are_called_anew(tmp_path):
    u = noise(N, T, X)
    path = hdf5(tmp_path / "mine.nc", {"u": ("run step lat", u)}, {
        "run": np.arange(N), "step": np.arange(T) * 0.5, "lat": CENTRES})
    file = open_array(path, AS_STORED)
    assert file.facts.params == file.facts.inputs == file.warnings == ()
    assert file.facts.dt == 0.5 and file.facts.domain == ((0.0, 2.0),)
    np.testing.assert_array_equal(file.read(range(N))[:, :, 0], u)


def test_a_channel_may_be_called_as_a_coordinate(tmp_path):
    t, u = noise(N, T, X), noise(N, T, X, seed=1)
    path = hdf5(tmp_path / "mine.nc", {"t": ("sample time x", t), "u": ("sample time x", u)},
                {"time": np.arange(T) / 2}, linear="by finite differences")
    with pytest.raises(UsageError, match="linear = 'by finite differences' is not understood"):
        open_array(path)
    file = open_array(path, said={"linear": False, "channels": "u t"})
    np.testing.assert_array_equal(file.read(range(N)), np.stack([u, t], 2))
    assert file.facts.dt == 0.5


def test_holes_and_packed_integers(tmp_path):
    u = np.arange(N * T * X).reshape(N, T, X).astype("i2")
    path = hdf5(tmp_path / "mine.nc", {"u": ("sample time x", u)}, {"time": np.arange(T)})
    with h5py.File(path, "a") as f:
        f["u"].attrs.update({"_FillValue": np.int16([7]), "scale_factor": 0.5, "add_offset": 10.0})
    want = np.where(u == 7, np.nan, u * 0.5 + 10)[:, :, None]
    np.testing.assert_array_equal(open_array(path).read(range(N)), want.astype("f4"))


@pytest.mark.parametrize("pack", [np.savez, np.save])
def test_numpy_files_with_a_yaml_beside_them(tmp_path, pack):
    u = noise(N, T, X, Y, 2).astype("f8")
    beside = {"channels": ["p", "q"], "boundary": "periodic closed", "dt": 0.1, "nu": 0.5,
              "beta": [1, 2, 3, -4], "mirrors": {"x": ["p"], "y": None}, "domain": [[0, 2], [0, 1]]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(beside))
    path = tmp_path / ("mine.npz" if pack is np.savez else "mine.npy")
    if pack is np.savez:
        pack(path, u=np.asfortranarray(u), a=u[:, 0, :, :, 0], x=CENTRES, gamma=np.ones(1),
             t=np.arange(T), k=np.arange(N), equation="p_t = q")
    else:
        pack(path, u)
    said = {"dt": 1.0} if pack is np.savez else {}  # wins over the YAML
    file = open_array(path, "sample time x y channel", said)
    np.testing.assert_array_equal(file.read(range(N)), np.moveaxis(u, 4, 2).astype("f4"))
    assert file.facts.channels == ("p", "q") and file.facts.mirrors == (("x", ("p",)), ("y", ()))
    assert file.facts.domain == ((0.0, 2.0), (0.0, 1.0))
    if pack is np.savez:
        assert file.facts.params == ("beta", "nu", "gamma", "k") and file.facts.dt == 1.0
        assert file.facts.equation == "p_t = q" and file.facts.inputs == ("a",)
        np.testing.assert_array_equal(file.params[:, 0], [1, 2, 3, -4])
        np.testing.assert_array_equal(file.read_inputs([1])[0, 0, 0], u[1, 0, :, :, 0].astype("f4"))
    else:
        assert file.facts.dt == 0.1 and file.facts.params == ("beta", "nu")


def test_given_channels_of_one_array(tmp_path):
    u = noise(N, T, 3, X)
    np.save(tmp_path / "mine.npy", u)
    said = {"channels": "c wind heat", "inputs": "wind", "dt": 1}
    file = open_array(tmp_path / "mine.npy", "sample time channel x", said)
    assert file.facts.channels == ("c", "heat") and file.facts.inputs == ("wind",)
    assert file.facts.inputs_vary
    np.testing.assert_array_equal(file.read(range(N)), u[:, :, [0, 2]])
    np.testing.assert_array_equal(file.read_inputs(range(N), range(2, 4)), u[:, 2:4, [1]])


def test_components_of_an_array_that_is_called_as_one_of_them(tmp_path):
    u = noise(N, T, X, 2)
    np.save(tmp_path / "mine.npy", u)  # an array of .npy is called u
    file = open_array(tmp_path / "mine.npy", "sample time x channel", {"channels": "u v", "dt": 1})
    assert file.facts.channels == ("u", "v")
    np.testing.assert_array_equal(file.read(range(N)), np.moveaxis(u, 3, 2))


def test_coordinates_as_mesh_grids(tmp_path):
    u, domain = noise(N, T, X, X), ((0.0, 2.0), (0.0, 6.0))
    x, y = np.meshgrid(CENTRES, 3 * CENTRES, indexing="ij")
    np.savez(tmp_path / "a.npz", u=u, x=x, y=y)
    np.savez(tmp_path / "b.npz", u=u, x=x.T, y=y)  # of other axes than are said
    with h5py.File(tmp_path / "a.h5", "w") as f:
        for name, values, axes in (("u", u, "sample time x y"), ("x", x, "x y"), ("y", y, "x y")):
            f[name] = values
            f[name].attrs["dims"] = axes
        f.attrs["dt"] = 1.0
    for file in (open_array(tmp_path / "a.npz", "sample time x y", {"dt": 1}),
                 open_array(tmp_path / "a.h5")):
        assert file.facts.domain == domain and file.facts.inputs == file.warnings == ()
    file = open_array(tmp_path / "b.npz", "sample time x y", {"dt": 1})
    assert file.facts.domain == ((0, 1), domain[1])
    assert "coordinates x (6, 6) are passed over" in file.warnings[0]


@pytest.mark.parametrize("shape, where", [((6,), "sample or over time or over x"),
                                          ((6, 6), "sample time or over sample x or over time x")])
def test_axes_that_are_as_long_are_asked_about(tmp_path, shape, where):
    """As many samples as frames and points: the shape says nothing."""
    np.savez(tmp_path / "a.npz", u=noise(6, 6, 6), a=noise(*shape))
    with pytest.raises(UsageError, match=rf"a \(6.*\) may lie over {where}, which are as long"):
        open_array(tmp_path / "a.npz", AS_STORED)
    np.savez(tmp_path / "a.npz", u=noise(6, 5, 6), a=noise(6), x=CENTRES)  # which says its axis
    assert open_array(tmp_path / "a.npz", AS_STORED, {"params": "a"}).facts.params == ("a",)
    file = open_array(tmp_path / "a.npz", AS_STORED, {"inputs": "a"})
    np.testing.assert_array_equal(file.read_inputs([0, 1]), [noise(6)[None, None]] * 2)


def test_no_parameters_is_not_all_of_them(tmp_path):
    np.savez(tmp_path / "a.npz", u=noise(N, 5, 6), nu=np.arange(N))
    assert open_array(tmp_path / "a.npz", AS_STORED).facts.params == ("nu",)
    (tmp_path / "a.yaml").write_text("params: []")
    assert open_array(tmp_path / "a.npz", AS_STORED).facts.params == ()
    write_fields(tmp_path / "b.h5", noise(N, 5, 6), params=[], dt=1)
    with h5py.File(tmp_path / "b.h5", "r+") as f:
        f.attrs["nu"] = 2.0
    assert open_array(tmp_path / "b.h5").facts.params == ("nu",)


def test_an_answer_to_its_inputs(tmp_path):
    a, u = noise(N, X, Y), noise(N, X, Y, seed=1)
    np.savez(tmp_path / "darcy.npz", a=a, u=u)
    file = open_array(tmp_path / "darcy.npz", "sample x y", {"steady": True, "inputs": "a"})
    np.testing.assert_array_equal(file.read(range(N)), np.stack([0 * u, u], 1)[:, :, None])
    np.testing.assert_array_equal(file.read_inputs(range(N)), a[:, None, None])
    assert file.facts.frames == 2 and file.facts.channels == ("u",) and file.warnings == ()


def test_one_long_trajectory(tmp_path):
    u = noise(50, X)
    np.save(tmp_path / "long.npy", u)
    file = open_array(tmp_path / "long.npy", "time x")
    np.testing.assert_array_equal(file.read([0], range(7, 50, 3))[0, :, 0], u[7::3])
    assert file.samples == 1 and "taken as 1" in file.warnings[0] and file.facts.dt == 1
    np.save(tmp_path / "point.npy", u[:, :1])
    assert open_array(tmp_path / "point.npy", "time x").facts.grid == (1,)


def test_a_folder_of_single_trajectories(tmp_path):
    u, folder = noise(11, T, X), tmp_path / "many"
    folder.mkdir()
    for i in range(11):  # 10 comes after 9
        np.savez(folder / f"run{i}.npz", u=u[i, :T - (i == 3)], nu=i / 10, dt=0.5)
    file, = pickle.loads(pickle.dumps(open_folder(folder, "time x", {"boundary": "periodic"})))
    np.testing.assert_array_equal(file.read([10, 0, 3])[:, :, 0], u[[10, 0, 3], :T - 1])
    np.testing.assert_array_equal(file.params[:, 0], np.arange(11) / 10)
    assert file.facts.name == "many" and file.facts.frames == T - 1 and file.facts.dt == 0.5
    assert file.warnings == (f"10 of 11 trajectories are cut to {T - 1} frames.",)
    np.savez(folder / "run4.npz", u=noise(T, X + 1), nu=0.4, dt=0.5)
    with pytest.raises(UsageError, match=r"run4.npz differ in grid \(\(6,\) and \(7,\)\)"):
        open_folder(folder, "time x", {"boundary": "periodic"})


def test_folders_of_files_and_of_splits(tmp_path):
    u = noise(N, T, X)
    for i, split in enumerate(("train", "train", "val", "test")):  # or valid
        (tmp_path / "mine" / split).mkdir(parents=True, exist_ok=True)
        write_fields(tmp_path / "mine" / split / f"{i}.h5", u, dt=0.5, params={"nu": i})
    files = open_folder(tmp_path / "mine")
    assert [file.split for file in files] == ["train", "train", "val", "test"]
    assert [float(file.params[0, 0]) for file in files] == [0, 1, 2, 3]
    files = open_folder(tmp_path / "mine/train", said={"name": "ours"})
    assert [(file.split, file.facts.name, file.samples) for file in files] == [("", "ours", N)] * 2


def test_zarr(tmp_path):
    zarr = pytest.importorskip("zarr")
    u = noise(N, T, X)
    group = zarr.open_group(tmp_path / "mine.zarr", mode="w")
    array = group.create_array("u", shape=u.shape, dtype="f4", chunks=(1, T, X),
                               dimension_names=("sample", "time", "x"))
    array[...] = u
    group.attrs.update({"dt": 0.5, "nu": 0.1})
    file = open_array(tmp_path / "mine.zarr")
    np.testing.assert_array_equal(file.read([2, 0], stride=2), u[[2, 0], :, None, ::2])
    zarr.save(tmp_path / "one.zarr", u)  # an array without a group
    one = open_array(tmp_path / "one.zarr", AS_STORED)
    np.testing.assert_array_equal(one.read(range(N))[:, :, 0], u)
    assert file.facts.dt == 0.5 and file.facts.params == ("nu",)


def test_matlab_stores_axes_in_reverse(tmp_path):
    u = noise(N, T, X)
    with h5py.File(tmp_path / "mine.mat", "w", userblock_size=512) as f:
        f["u"], f["dt"] = u.transpose(), [[0.5]]
        f["u"].attrs["MATLAB_class"] = np.bytes_("single")
    with pytest.raises(Unrecognised, match="say for example --axes 'x time sample'"):
        open_array(tmp_path / "mine.mat")
    file = open_array(tmp_path / "mine.mat", "x time sample")
    assert file.facts.dt == 0.5 and file.facts.params == ()
    np.testing.assert_array_equal(file.read(range(N))[:, :, 0], u)


def test_vectors_of_matlab_and_numbers_that_yaml_takes_for_text(tmp_path):
    nu = np.linspace(-1, 1, N)
    np.savez(tmp_path / "mine.npz", u=noise(N, T, X), nu=nu[:, None], x=CENTRES[None],
             t=np.arange(T)[:, None] / 2)
    (tmp_path / "mine.yaml").write_text("rho: 1e-3\nmu: [1e-3, 2, 3, 4]\n")
    file = open_array(tmp_path / "mine.npz", "sample time x")
    assert file.facts.params == ("rho", "mu", "nu") and file.warnings == ()
    np.testing.assert_array_equal(file.params.T, [[1e-3] * N, [1e-3, 2, 3, 4], nu])
    assert file.facts.dt == 0.5 and file.facts.domain == ((0.0, 2.0),)


AS_STORED = "sample time x"


@pytest.mark.parametrize("axes, said, more, sentence", [
    ("sample time x y", {}, {}, r"no array has as many; found .*u \(4, 5, 6\)"),
    ("", {}, {}, r"for example --axes 'sample time x', .* u \(4, 5, 6\)"),
    ("sample x y", {}, {}, "one `time` unless the facts say steady"),
    ("sample time time", {}, {}, "and none twice"),
    ("N T X", {}, {}, "axis n may be of samples or of points; call it sample, or x"),
    ("b t x", {}, {}, ""), ("Batch Time x", {}, {}, ""),
    (AS_STORED, {"channels": "w"}, {"v": noise(N, T, X)}, "there is no channel w; there are"),
    (AS_STORED, {"channels": "v w"}, {}, "2 names for the 1 of u"),
    (AS_STORED, {"dt": 3}, {"t": np.arange(T)}, "said to be 3, but its frames are 1 apart"),
    (AS_STORED, {"params": "nu"}, {}, "no parameter nu; there are none"),
    (AS_STORED, {"nu": [1, 2]}, {}, "one for each of 4 samples; it is .* .2 values."),
    (AS_STORED, {"nu": "high"}, {}, "neither a fact nor a number"),
    (AS_STORED, {"nu": True}, {}, "neither a fact nor a number"),
    (AS_STORED, {"domain": [0, 1, 2, 3]}, {}, "domain is .* for each of the axes x"),
    (AS_STORED, {"boundary": "open"}, {}, "boundary names 'open'"),
    (AS_STORED, {}, {"t": [0, 1, 2, 3, 5]}, "uneven, with steps from 1 to 2"),
    (AS_STORED, {}, {"t": -np.arange(T)}, "fall; store them in ascending order"),
    ("sample x time", {}, {"x": np.arange(X)}, f"x has {T} points by the axes, but {X} coord"),
    (AS_STORED, {}, {"nu": np.ones(N - 1)}, "nu .* fits no axis"),
    (AS_STORED, {}, {"psi": np.ones((N, T, X), complex)}, "psi .* is complex"),
    (AS_STORED, {}, {"rows": np.array([{}], object)}, "rows.npy holds Python objects"),
    ("sample,time,x", {}, {}, ""),
    (AS_STORED, {"channels": "rho"}, {"v": noise(N, T, X)}, "no channel rho; there are u v"),
    (AS_STORED, {"inputs": "bedd"}, {}, "no channel bedd; there are u"),
    (AS_STORED, {"steady": True}, {}, "steady, but has 5 frames; leave the axis of time out"),
    (AS_STORED, {"first_frame": -1}, {}, "first_frame = -1 is not understood"),
    (AS_STORED, {"first_frame": 1.5}, {}, "first_frame = 1.5 is not understood"),
    (AS_STORED, {}, {"x": [0, 1, np.nan, 3, 4, 5]}, "points of x do not all rise, nor all fall"),
    (AS_STORED, {}, {"x": np.zeros(X)}, "points of x do not all rise"),
    (AS_STORED, {"domain": "0 1"}, {"x": np.zeros(X)}, "")])
def test_what_is_said_and_stored_must_fit(tmp_path, axes, said, more, sentence):
    np.savez(tmp_path / "a.npz", u=noise(N, T, X), **more)
    if not sentence:
        assert open_array(tmp_path / "a.npz", axes, said).samples == N
        return
    with pytest.raises(UsageError, match=sentence) as caught:
        open_array(tmp_path / "a.npz", axes, said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, words", [
    ("old.mat", r"cannot be read \(.*\); save it with -v7.3"), ("three.nc", "as netCDF-4"),
    ("a.h5", "cannot be read"), ("a.npy", "cannot be read"), ("none.h5", "no such file"),
    ("a.txt", "neither HDF5, netCDF-4, .npy, .npz nor zarr"), ("a.zarr", "pip install zarr"),
    ("groups.h5", r"found train/ \(whose arrays must lie outside of it\)")])
def test_files_that_are_nothing_of_the_kind(tmp_path, name, words, monkeypatch):
    path = tmp_path / name
    monkeypatch.setitem(sys.modules, "zarr", None)
    if name == "groups.h5":
        with h5py.File(path, "w") as f:
            f["train/u"] = noise(N, T, X)
    elif name == "a.zarr":
        path.mkdir()
    elif name != "none.h5":
        path.write_bytes(b"CDF\x01 or MATLAB 5.0 MAT-file")
    with pytest.raises(UsageError, match=words):
        open_array(path, AS_STORED)


def test_a_file_that_is_open_already(tmp_path):
    path = write_fields(tmp_path / "mine.h5", noise(N, T, X, Y), axes="x y")
    with h5py.File(path) as file:
        np.testing.assert_array_equal(open_array(path).read(range(N))[:, :, 0], file["u"])


@pytest.mark.parametrize("engine", ["netcdf4", "h5netcdf", "zarr"])
def test_xarray_reads_the_same(tmp_path, engine):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip({"netcdf4": "netCDF4"}.get(engine, engine))
    u = noise(N, T, X, Y)
    u[1, 2, 3] = np.nan
    data = xarray.Dataset(
        {"u": (("sample", "time", "x", "y"), u), "a": (("y", "x"), noise(Y, X, seed=1)),
         "k": (("sample", "time", "x", "y"), np.arange(u.size).reshape(u.shape)),
         "nu": ("sample", np.linspace(-1, 1, N)), "w": (("sample", "time", "x", "y"), u > 0),
         "v": (("sample", "time", "x", "y", "component"), noise(N, T, X, Y, 2, seed=2))},
        {"time": np.arange(T) * 0.5, "x": CENTRES}, {"boundary": "periodic closed", "rho": 2.0})
    data = data.rename(component="channel")
    packed = {"u": {"_FillValue": 1e20}, "k": {"dtype": "f8", "scale_factor": 0.5}}
    path = tmp_path / ("mine.zarr" if engine == "zarr" else "mine.nc")
    if engine == "zarr":
        data.to_zarr(path, encoding={"k": packed["k"]})
        theirs = xarray.open_zarr(path)
    else:
        data.to_netcdf(path, engine=engine, encoding=packed)
        theirs = xarray.open_dataset(path, engine=engine)
    file = open_array(path)
    assert {*file.facts.channels} == {"u", "k", "w", "v_0", "v_1"} and file.facts.inputs == ("a",)
    names = [name for name in file.facts.channels if name in "ukw"]
    want = np.stack([theirs[name].values.astype("f4") for name in names], 2)
    np.testing.assert_array_equal(file.read(range(N), channels=names), want)
    np.testing.assert_array_equal(file.read(range(N), channels=["v_0", "v_1"]),
                                  np.moveaxis(theirs["v"].values, 4, 2))
    np.testing.assert_array_equal(file.read_inputs([0])[0, 0, 0], theirs["a"].values.T)
    np.testing.assert_array_equal(file.params, np.stack([np.full(N, 2.0), theirs["nu"]], 1))
    assert file.facts.domain == ((0.0, 2.0), (0.0, 1.0)) and file.facts.dt == 0.5


def test_xarray_reads_what_is_written(tmp_path):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    u = noise(N, T, X, Y)
    theirs = xarray.open_dataset(write_fields(tmp_path / "mine.h5", u, axes="x y", dt=0.5,
                                              domain="0 1 0 2"), engine="netcdf4")
    assert theirs["u"].dims == ("sample", "t", "x", "y")
    np.testing.assert_array_equal(theirs["u"].values, u)
    np.testing.assert_array_equal(theirs["t"].values, np.arange(T) * 0.5)


@pytest.mark.parametrize("how", ["link", "raw", "virtual", "chain"])
def test_what_lies_in_another_file_is_not_followed(tmp_path, how):
    """A link, raw bytes, a virtual set of a file outside, and one of a file whose bytes are."""
    shape, raw = (N, T, X), [(str(tmp_path / "raw.bin"), 0, 4 * N * T * X)]
    np.zeros(shape, "f4").tofile(tmp_path / "raw.bin")
    (tmp_path / "mine").mkdir()
    hdf5(tmp_path / "other.h5", {"u": (AS_STORED, noise(*shape))})
    with h5py.File(tmp_path / "mine/raw.h5", "w") as f:
        f.create_dataset("u", shape, "f4", external=raw)
    with h5py.File(tmp_path / "mine/a.h5", "w") as f:
        if how == "link":
            f["u"] = h5py.ExternalLink("../other.h5", "u")
        elif how == "raw":
            f.create_dataset("u", shape, "f4", external=raw)
        else:
            layout = h5py.VirtualLayout(shape, "f4")
            source = "../other.h5" if how == "virtual" else "raw.h5"
            layout[...] = h5py.VirtualSource(source, "u", shape)
            f.create_virtual_dataset("u", layout)
    with pytest.raises(UsageError, match="h5: u lies in another file, which is not followed"):
        open_array(tmp_path / "mine/a.h5", AS_STORED)


def test_said_facts_are_those_of_a_data_set():
    assert {*READ} == {field.name for field in dataclasses.fields(Facts)} - MEASURED
    for key, (_, example) in READ.items():
        assert understand({key: example}, "here")[0].keys() == {key}
