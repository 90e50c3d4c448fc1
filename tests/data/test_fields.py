import pickle
from types import SimpleNamespace

import by_hand
import equations
import h5py
import numpy as np
import pytest
import torch

from ups.config import UsageError
from ups.data import write_fields
from ups.data.check import check_said
from ups.data.fields import SPLITS, Fields
from ups.data.find import NoData, find, open_data, open_fields


@pytest.fixture
def family(tmp_path):
    """Burgers at three viscosities, 40 samples each."""
    return tmp_path, {nu: by_hand.build("burgers1d", tmp_path / f"1D_Burgers_nu{nu}.hdf5",
                                        samples=40, seed=i, Nu=nu)
                      for i, nu in enumerate((0.1, 0.001, 1.0))}


def test_a_family_is_one_data_set(family):
    root, u = family
    fields = open_fields("burgers1d", root)
    assert len(fields) == 120 and fields.facts.params == ("nu",)
    everything = np.concatenate([u[0.001], u[0.1], u[1.0]])
    indices = torch.tensor([119, 3, 41, 41, 80, 0])
    np.testing.assert_array_equal(fields.read(indices), everything[indices])
    assert fields.read(indices).dtype == torch.float32
    assert fields.params(indices).flatten().tolist() == [1.0, 0.001, 0.1, 0.1, 1.0, 0.001]
    fields = pickle.loads(pickle.dumps(fields))  # other processes read the same
    streamed = torch.cat(list(fields.stream(indices, megabytes=0.001)))
    np.testing.assert_array_equal(streamed, everything[indices].reshape(-1, 1, by_hand.X))


def test_a_notice_is_given_once(tmp_path, capsys):
    write_fields(tmp_path / "once.h5", np.random.default_rng(0).normal(size=(40, 3, 8)), dt=0.1)
    for _ in range(2):  # as training an ensemble does
        open_fields("once", tmp_path)
    assert capsys.readouterr().err.count("once: only 4 test trajectories") == 1


def test_parameters_choose_files(family):
    root, u = family
    fields = open_fields("burgers1d:nu=0.001,1", root)
    assert len(fields) == 80 and fields.params([0, 79]).flatten().tolist() == [0.001, 1.0]
    for task, words in (("cns3d", "download"),
                        ("burgers1d:nu=0.5", r"nu=\[0.5\] in .*, only \[0.001, 0.1, 1.0\]; make"),
                        ("burgers1d:rho=0.5", r"rho=\[0.5\] in .*, only \[nan"),
                        ("burger", "no data set burger in .*; there are: 1D_Burgers_nu0.001.hdf5")):
        with pytest.raises(NoData, match=words):
            open_fields(task, root)


def test_recognition_is_exact_or_asks(tmp_path, monkeypatch):
    """Allen-Cahn has the keys of Burgers, but neither its name nor its conserved mean."""
    path = tmp_path / "data/allen_cahn.h5"
    path.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    u = by_hand.build("burgers1d", path, samples=20, nu=0.02)
    for data in (path, path.parent):
        with pytest.raises(UsageError, match="could be burgers1d, .* say --tasks burgers1d if it"):
            find(data)
    with pytest.raises(NoData, match="no data set burgers1d in"):
        open_data(SimpleNamespace(data=(), tasks=(), axes="", facts=""), make=False)
    with pytest.raises(NoData, match=f"make advection1d --out {path.parent}$"):  # not into a file
        find(path, tasks=("advection1d",))
    (name, (file,)), = find(path, axes="sample time x").items()
    assert (name, file.facts.params, file.facts.conserved) == ("allen_cahn", ("Nu", "nu"), ())
    np.testing.assert_array_equal(file.read(range(20)), u)
    with pytest.raises(UsageError, match="The mean of u is said to be conserved, but moves by"):
        check_said(open_fields("burgers1d", path))
    by_hand.build("burgers1d", path.parent / "1D_Burgers_Sols_Nu0.01.hdf5", seed=1)
    for tasks in (("burgers1d",), ()):  # a named file is meant, not the other
        (file,), = find(path.parent, tasks).values()
        assert file.path.name == "1D_Burgers_Sols_Nu0.01.hdf5"
        assert file.warnings == ("beside it allen_cahn.h5 is left out; name it in --data.",) * (
            not tasks)


def test_facts_are_said_of_published_files_too(published, tmp_path):
    path, _ = published["cns1d"]  # which do not say their boundary
    (file,), = find(path, ("cns1d",), said={"boundary": "closed", "first_frame": 1}).values()
    assert file.facts.boundary == ("closed",) and Fields([file]).facts.frames == by_hand.T - 1
    for said, words in (({"boundary": "closed closed"}, "say it for each of the axes x"),
                        ({"channels": "rho"}, "channels of .* is what the published format says"),
                        ({"nu": 3}, "nu of .* is what the published format says")):
        with pytest.raises(UsageError, match=words):
            find(path, ("cns1d",), said=said)
    convection, _, _ = equations.convection(tmp_path)
    file, *_ = find(convection, said={"conserved": "buoyancy"})["convection"]
    assert file.facts.conserved == ("buoyancy",)
    yaml = convection.with_name(f"{convection.name}.yaml")
    yaml.write_text("conserved: buoyancy\n")  # a YAML beside them is heard too
    assert find(convection)["convection"][0].facts.conserved == ("buoyancy",)
    yaml.write_text("dt: 3\n")
    with pytest.raises(UsageError, match="yaml: dt of .* is what the published format says"):
        find(convection)


def test_data_that_are_nothing_are_listed(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.csv").write_text("1")
    with pytest.raises(NoData, match="holds a.csv, sub/: no file .h5"):
        find(tmp_path)
    with pytest.raises(NoData, match="no such file or folder; .* holds a.csv, sub/"):
        find(tmp_path / "b.csv")


def test_splits_are_disjoint_complete_and_equal_across_files(family):
    root, _ = family
    fields = open_fields("burgers1d", root)
    parts = {name: fields.split(name) for name in SPLITS}
    assert [len(parts[name]) for name in SPLITS] == [96, 6, 6, 12]
    assert sorted(torch.cat(list(parts.values())).tolist()) == list(range(120))
    for part in parts.values():
        by_set = [sorted((part[part // 40 == k] % 40).tolist()) for k in range(3)]
        assert by_set[0] == by_set[1] == by_set[2]
    assert sorted(set((parts["test"] % 40).tolist())) == [0, 1, 2, 3]  # the first tenth
    one = open_fields("burgers1d:nu=0.1", root)
    assert one.split("val").tolist() == sorted({i % 40 for i in parts["val"].tolist()})
    # Fixed for ever: a model trained before must not meet its validation samples.
    assert one.split("fit").tolist() == FIT and one.split("val").tolist() == VAL


FIT, VAL = [13, 38], [4, 7]


def test_files_of_equal_parameters_are_joined_in_natural_order(tmp_path):
    """And the test split is the last tenth, as published."""
    parts = [by_hand.build("ns2d", tmp_path / f"ns-{i}.h5", samples=2, frames=3, seed=i)
             for i in (0, 2, 10)]
    fields = open_fields("ns2d", tmp_path)
    assert len(fields) == len(set(fields.sample)) == 6
    np.testing.assert_array_equal(fields.read(range(6)), np.concatenate(parts))
    assert fields.split("test").tolist() == [5]


def test_files_that_do_not_fit_are_refused(family):
    root, _ = family
    more = root / "1D_Burgers_more.hdf5"
    by_hand.build("burgers1d", more, samples=41, Nu=2.0)
    with pytest.raises(UsageError, match=r"differ in samples \[40, 40, 40, 41\]"):
        open_fields("burgers1d", root)
    by_hand.build("burgers1d", more, samples=40, frames=9, Nu=2.0)
    assert len(open_fields("burgers1d:nu=2", root)) == 40
    cut = open_fields("burgers1d", root)  # 9 frames are two pieces of 5 that share the one between
    assert (cut.facts.frames, len(cut)) == (5, 3 * 40 + 2 * 40)
    late = cut.split("test")[-1]
    assert torch.equal(cut.read([late])[0, 0], cut.read([late - 1])[0, -1])
    (root / "1D_broken.hdf5").write_text("half a download")
    with pytest.raises(UsageError, match="broken.hdf5 cannot be read"):
        open_fields("burgers1d:nu=2", root)


def test_wrong_strides_name_those_that_fit(family):
    with pytest.raises(UsageError, match="stride_x 3 does not divide .* 1, 2, 4, 8, 16 do"):
        open_fields("burgers1d", family[0], stride_x=3)
    with pytest.raises(UsageError, match="fewer than two"):
        open_fields("burgers1d", family[0], stride_t=5)


def test_the_digest_follows_content_and_not_names(tmp_path):
    paths = [tmp_path / "a" / "x.hdf5", tmp_path / "b" / "y.h5"]
    for path in paths:
        path.parent.mkdir()
        by_hand.build("burgers1d", path)
    first, second = (open_fields("burgers1d", path).digest for path in paths)
    assert first == second and len(first) == 64
    for nu, more in ((0.02, 0), (0.01, 1)):
        with h5py.File(paths[1], "r+") as f:
            f.attrs["Nu"] = nu
            f["tensor"][3, 2] += more
        assert open_fields("burgers1d", paths[1]).digest != first


def test_a_large_file_passes_through_little_memory(tmp_path):
    """It has 128 MB in shape and kilobytes on disk: its chunks were never allocated."""
    with h5py.File(tmp_path / "big.h5", "w") as f:
        f.create_dataset("u", (8, 64, 512, 128), "f4", chunks=(1, 8, 512, 128), fillvalue=1.5)
        f["u"].attrs["dims"] = "sample time x y"
        f.attrs["boundary"] = "closed closed"
    fields = open_fields("big", tmp_path / "big.h5")
    fields.digest  # noqa: B018
    before, peak, values = anonymous(), 0.0, 0
    for u in fields.stream(torch.arange(len(fields))):
        assert u[0, 0, 0, 0] == 1.5
        values += u.numel()
        peak = max(peak, anonymous() - before)
    assert values == 8 * 64 * 512 * 128 and peak < 100


def anonymous():
    """Memory of this process that is no mapped file, in MB."""
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
