"""Facts against data: what is true passes, what is not is refused with its number."""

import re
from pathlib import Path

import numpy as np
import pytest

from ups.config import UsageError
from ups.data import check, write_fields
from ups.data.arrays import open_array
from ups.data.check import COPIES, Averages, mirror_doubt, nonlinear, shift_doubt
from ups.data.fields import Fields

X = np.arange(64) / 64


def waves(n, seed=0, frames=6, speed=1.0, channels=1):
    """Homogeneous random fields (n, T, C, x) of deviation 1 that move to the right."""
    random, k = np.random.default_rng(seed), np.fft.rfftfreq(64, 1 / 64)
    shape = (n, 1, channels, len(k))
    a = (random.normal(size=shape) + 1j * random.normal(size=shape)) * np.exp(-k / 6) * (k > 0)
    t = 0.02 * np.arange(frames)[:, None, None]
    u = np.fft.irfft(a * np.exp(-2j * np.pi * k * speed * t), 64)
    return u / u.std()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def mine(u, a=None, **facts):
    """Fields (n, T, C, *grid), and an input a (n, *grid), of a file that says these facts."""
    said = {"channels": [f"u{c}" for c in range(u.shape[2])], "dt": 0.1, "shifts": "",
            "axes": list("xyz"[:u.ndim - 3]), "boundary": ["periodic"] * (u.ndim - 3)}
    path = write_fields("mine.h5", u, inputs=None if a is None else {"a": a}, **said | facts)
    return Fields([open_array(path)])


def of(u):
    return Averages(tuple(f"u{c}" for c in range(u.shape[2])), "x", u)


def refused(words, *data, **facts):
    with pytest.raises(UsageError, match=words) as caught:
        check.check_said(mine(*data, **facts))
    assert str(caught.value).startswith("mine.h5: ") and "\n" not in str(caught.value)


def test_homogeneous_fields_may_be_shifted_and_a_mean_profile_is_found():
    """At most 2 % of homogeneous fields are refused; ten percent of their spread are found."""
    refusals = [shift_doubt(of(waves(16, seed)), "x")[0] <= check.UNLIKELY for seed in range(3)]
    assert sum(refusals) <= 1  # 0.06 expected
    u, profile = waves(64), 0.2 * np.sin(8 * np.pi * X)
    assert shift_doubt(of(u), "x")[0] > 0.01
    chance, share, _ = shift_doubt(of(u + profile), "x")
    assert chance == 1 / (COPIES + 1) and 0.12 < share < 0.28
    assert shift_doubt(of(u * (1 + profile)), "x")[0] < 0.01  # the variance alone


def test_a_profile_along_one_axis_does_not_keep_the_other_from_shifts():
    random = np.random.default_rng(0)
    u = random.normal(size=(20, 4, 2, 12, 20))
    u[:, :, 1] += 0.15 * np.cos(2 * np.pi * np.arange(20) / 20)
    fields = mine(u)
    assert check.shiftable(fields, ["x", "y"]) == ("x",)
    del fields.look
    fields.sample = np.zeros(20, int)  # all begin alike: one sample
    assert check.shiftable(fields, ["x", "y"]) == ()
    assert check.shiftable(mine(u[:7]), ["x", "y"]) == ()  # of too few nothing is said


@pytest.mark.parametrize("axis, odd, speed, possible", [
    ("x", [], 1.0, False), ("x", ["u0"], 1.0, False), ("", ["u0"], 1.0, True),
    ("x", [], 0.0, True)])
def test_mirrors_of_moving_waves(axis, odd, speed, possible):
    """Gaussian waves that move to the right are, mirrored, waves that move to the left."""
    chance, share, channel = mirror_doubt(of(waves(40, speed=speed)), axis, odd)
    assert (chance > 0.02) == possible and channel == "u0"
    if not possible:
        assert chance == 1 / (COPIES + 1) and share > 0.8


def test_coupled_channels_must_change_sign_together():
    u = waves(40, speed=0.0, channels=2)
    u[:, :, 1] += np.gradient(u[:, :, 0], axis=-1) * 3  # odd in x
    seen = of(u)
    assert mirror_doubt(seen, "x", ["u1"])[0] > 0.02
    assert mirror_doubt(seen, "", ["u0", "u1"])[0] > 0.02
    for odd in ([], ["u0", "u1"]):
        assert mirror_doubt(seen, "x", odd)[0] == 1 / (COPIES + 1)


def test_speed_that_depends_on_the_place_is_seen_in_the_changes():
    """Mean and variance are those of the waves; only how fast they go depends on x."""
    phase = np.random.default_rng(0).uniform(0, 2 * np.pi, (32, 1, 1, 1))
    time = np.arange(6)[:, None, None] * (1 + 0.5 * np.sin(2 * np.pi * X))
    u = np.sin(2 * np.pi * 3 * X + phase - 0.3 * time)
    assert shift_doubt(of(u), "x")[0] == 1 / (COPIES + 1)


def test_a_flat_or_symmetric_field_has_no_side():
    u = np.tile(np.cos(2 * np.pi * (X + 1 / 128)), (10, 3, 1, 1))
    assert mirror_doubt(of(u), "x", [])[0] == 1
    assert mirror_doubt(of(0 * u), "", ["u0"])[0] == 1
    assert shift_doubt(of(0 * u), "x")[0] == 1
    assert mine(u[..., :1]).look.seen.size > 0  # an axis of one point
    assert shift_doubt(of(u[..., :1]), "x")[0] == mirror_doubt(of(u[..., :1]), "x", [])[0] == 1


def test_linear_maps_and_others():
    u = waves(24, frames=5)
    assert nonlinear(u) < 0.01  # the shortest wave only stands
    v = np.stack([u[:, 0] * 0.8**k / (1 + 0.5 * k * u[:, 0]**2) for k in range(5)], 1)
    assert nonlinear(v) > 0.2
    assert nonlinear(v[:4]) == 0.0  # of too few nothing is said


def test_what_is_true_is_not_refused():
    u = waves(40).astype(np.float32)
    check.check_said(mine(u, conserved="u0", mirrors=":u0", shifts="x", linear=True))
    check.check_said(mine(u + 10, positive="u0", conserved="u0"))
    u = np.maximum(waves(12), 0)  # of a steady problem the first of two frames is nothing
    u[:, 0] = 0
    check.check_said(mine(u[:, :2], steady=True, positive="u0"))


def test_what_is_said_and_wrong_is_refused_with_its_number():
    u = waves(40)
    drift = u + 0.01 * np.arange(6)[:, None, None]
    refused("The mean of u0 is said to be conserved, but moves by 0.049 of its rms", drift,
            conserved="u0")
    refused("u0 is said to be positive, but falls to -[0-9.]+", u, positive="u0")
    refused("Axis x is said to be periodic, but .* [0-9.]+ times those inside", u + 4 * X)
    refused(r"A shift along x is said .* averages of u0 over 32 trajectories .* by 50 % of their",
            u + 0.4 * np.sin(2 * np.pi * X), shifts="x")
    refused("The mirror of x is said to give solutions, but averages of u0 over 32 traj", u,
            mirrors="x:")
    refused("The u0 -> -u0 is said", np.exp(u), mirrors=":u0")
    refused(r"said to be linear, but \d+ % of a step", np.stack(
        [u[:, 0] / (1 + k * u[:, 0]**2) for k in range(6)], 1), shifts="x", linear=True)


def test_uneven_inputs_excuse_uneven_fields():
    """The place enters by the input, which moves along, so that nothing is contradicted."""
    a = np.tile(1 + 0.5 * np.sin(2 * np.pi * X), (40, 1))
    u = a[:, None, None] * waves(40)
    refused("shift along x", u, shifts="x")
    check.check_said(mine(u, a, shifts="x"))
    refused("a is said to be positive, but falls to -1.5", u, -a, positive="a")


def test_means_are_checked_on_all_points():
    """Every second point of a conserved field need not have a constant mean."""
    u = waves(10) + 0.1 * np.arange(6)[:, None, None] * (-1) ** np.arange(64)
    mine(u, conserved="u0")
    check.check_said(Fields([open_array("mine.h5")], stride_x=2))


def test_proposals_are_what_the_data_support():
    def proposed(*data, **facts):
        return " ".join(check.proposals(mine(*data, **facts)))

    said = proposed(waves(40, speed=0.0).astype(np.float32) + 9)
    assert "add conserved = u0?" in said
    assert "mirror of x is not contradicted: add it to mirrors?" in said
    assert proposed(waves(40), conserved="u0") == (  # it goes to the right
        "u0 -> -u0 is not contradicted: add it to mirrors?")
    assert proposed(np.exp(waves(40)), conserved="u0") == ""


def test_the_line_of_what_is_used():
    u = waves(8, channels=2)
    assert check.uses(mine(u).facts) == "no symmetry, nothing conserved"
    facts = mine(u, shifts="x", mirrors="x: u0; : u0 u1", linear=True, conserved="u1").facts
    assert check.uses(facts) == ("shifts along x; mirror of x with u0 -> -u0; u0 -> -u0 and "
                                 "u1 -> -u1; sums of solutions; mean of u1 kept")


def test_seams():
    """Random waves, a ramp, ends held at zero, and shocks anywhere."""
    def ratio(u):
        return mine(u).look.seams[0]

    u, rms = waves(40), lambda x: np.sqrt(np.square(x).mean((1, 2, 3)))
    late, wrapped = u[:, 3:], np.concatenate([u, u[..., :2]], -1)[:, 3:]
    jumps = np.maximum(*(rms(np.diff(wrapped, n=n)[..., 64 - n:64]) / rms(np.diff(late, n=n))
                         for n in (1, 2)))[:32]
    assert np.quantile(jumps, 0.7) < ratio(u) < np.quantile(jumps, 0.8)  # of the 32 for training
    assert ratio(waves(40) + 10 * X) > 3
    assert 0.5 < min(long := [ratio(waves(1, seed, 200)) for seed in range(6)])
    assert max(long) < 1.6  # pieces of one trajectory
    held = np.sin(np.pi * (np.arange(64) + 0.5) / 64 * np.arange(1, 9)[:, None, None, None])
    assert ratio(np.repeat(held, 2, 1)) > 3
    first = np.random.default_rng(1).integers(64, size=40)
    shocks = np.stack([np.roll(X, k) for k in first])[:, None, None]
    assert ratio(np.repeat(shocks, 2, 1)) < 1.5


@pytest.mark.parametrize("shape, repeats", [
    ("both ends stored", True), ("cell centres", False), ("walls at zero", False),
    ("ends held at one value", False), ("walls, and another channel that moves", False),
    ("the same along the axis", False)])
def test_a_last_point_that_repeats_the_first_is_asked_about(tmp_path, shape, repeats, capsys):
    x, u = np.linspace(0, 1, 33), waves(12, frames=4)[..., :33]
    if shape == "both ends stored":
        u = waves(12, frames=4)[..., [*range(64), 0]]
    elif shape == "the same along the axis":
        u = u[..., :1] + 0 * x
    elif shape != "cell centres":
        u = (u * np.sin(np.pi * x) + (shape == "ends held at one value")).round(12)
        if "another" in shape:
            u = np.concatenate([u, waves(12, 1, frames=4)[..., :33]], 2)
    path = write_fields(tmp_path / "mine.h5", u, axes="x", dt=0.1)
    if not repeats:
        assert Fields([open_array(path)]).facts.boundary
        return
    with pytest.raises(UsageError, match="mine.h5: both ends of x are always equal; leave the"):
        Fields([open_array(path)])
    with pytest.raises(UsageError, match="Axis x is periodic, and its last point repeats the f"):
        check.check_said(Fields([open_array(path, said={"boundary": "periodic"})]))
    check.check_said(Fields([open_array(path, said={"boundary": "closed"})]))
    write_fields(path, u[..., :-1], axes="x", dt=0.1)
    assert Fields([open_array(path)]).facts.boundary == ("periodic",)


def test_the_eleven_are_known_in_the_data_package_alone():
    root = Path(check.__file__).parents[2]
    sources = [*root.glob("ups/**/*.py"), *root.glob("*.py"), *root.glob("benchmarks/*.py")]
    assert len(sources) > 60
    assert [path for path in sources if re.search(r"pdebench\b.*\bTASKS\b", path.read_text())
            and path.parent != root / "ups/data"] == []
