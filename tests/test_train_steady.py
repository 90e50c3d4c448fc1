"""The steady stage: from nothing to a table, coordinates, mirror images, draws, faults."""

import json

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from launching import ROOT, launch
from safetensors.torch import load_file

import train_steady as script
from ups.config import UsageError
from ups.data import write_fields
from ups.data.augment import moved
from ups.data.make import make
from ups.eval.measure import measure
from ups.eval.steady import calibrate, draw, images, read, steady_forecasts
from ups.latents import open_tasks
from ups.models.body import BodyConfig
from ups.models.steady import SteadyPrior
from ups.stages import load_stage

TINY = ["--steps", "12", "--batch_size", "8", "--log_every", "1", "--eval_every", "6",
        "--save_every", "2", "--warmup", "4", "--codec.patch", "4", "--model.dim", "16",
        "--model.depth", "1", "--model.modes", "4", "--denoiser.dim", "16", "--denoiser.depth", "1",
        "--denoiser.modes", "4", "--members", "4", "--calls", "5"]
LONG = ["--steps", "240", "--model.dim", "32", "--model.depth", "2", "--batch_size", "16",
        "--eval_every", "80", "--lr", "1e-2", "--log_every", "20"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make("darcy2d", out=folder, samples=60, grid=16)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    """A prior that has learned a little."""
    return run(tmp_path_factory.mktemp("trained"), data, *LONG)


@pytest.fixture(scope="module")
def short(tmp_path_factory, data):
    """Twelve steps, the last four of which learn what the mean leaves."""
    return run(tmp_path_factory.mktemp("short"), data)


def run(folder, data, *more):
    script.main(flags(folder, data, *more))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return folder


def flags(folder, data, *more):
    return ["--run", str(folder / "run"), "--data", str(data), "--cache", str(folder / "cache"),
            *TINY, *map(str, more)]


def losses(folder):
    lines = map(json.loads, (folder / "steady" / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def score(result, forecast, name="nrmse"):
    return result["forecasts"][forecast]["scores"][name]["all"]


@pytest.fixture
def loaded(trained):
    """The frozen prior and its task."""
    def build(config, tasks):
        sizes = (BodyConfig(**config[key]) for key in ("model", "denoiser"))
        return SteadyPrior(*sizes, *tasks, len(config["fields"][0]["inputs"]))

    steady = load_stage(trained / "run", "steady", build)
    (task,) = open_tasks(Accelerator(cpu=True), steady.settings)
    return steady.model, task


def test_from_nothing_to_a_table(trained, data, capsys):
    stage = trained / "run" / "steady"
    test = json.loads((stage / "test.json").read_text())
    result = test["tasks"]["darcy2d"]
    assert "or given, is left out" in test["definitions"]["nrmse"]
    assert result["trajectories"] == 6
    assert score(result, "members") < 0.5 * score(result, "law")  # better than no network
    assert score(result, "codec") < 2e-3
    assert score(result, "members", "crps") < score(result, "alone", "crps")  # draws say more
    assert 0.4 < score(result, "members", "spread_skill") < 2.5
    assert (stage / "steady.png").stat().st_size > 20_000
    script.main(flags(trained, data, *LONG))
    assert "is finished (step 240)" in capsys.readouterr().out


def test_the_prior_starts_as_the_mean_of_train_scaled_by_the_law(loaded):
    prior, task = loaded
    new = type(prior)(script.Config().model, script.Config().denoiser, task.spec, 1)
    new.load_state_dict({name: tensor for name, tensor in prior.state_dict().items()
                         if "." not in name}, strict=False)
    train, a, _ = read(task, task.fields.split("train"), "cpu")
    cond, noise = torch.zeros(2, 1), torch.randn(2, *new.zero.shape)
    mean, members = draw(new, task, task.fields.split("train")[:2], 4, 4)
    shape = (train / train.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).mean(0)
    shape = sum(shape.flip(axes) for axes in ((), (1,), (2,), (1, 2)))
    cosine = (mean * shape).flatten(1).sum(1) / mean.flatten(1).norm(dim=1) / shape.norm()
    assert (cosine > 0.998).all()
    law = mean.flatten(1).norm(dim=1) / train[:2].flatten(1).norm(dim=1)
    assert (law.log().abs() < 0.4).all()  # where sizes differ by a factor of eight
    # the network is zero, so a draw is the noise itself
    drawn = new.draw(cond, task.codec.encode_inputs(a[:2]), noise, 3)
    assert torch.allclose(drawn, prior.scale * noise, atol=1e-6)
    assert members.std(1).min() > 0


def test_coordinates_are_inverted_and_measure_the_field(loaded):
    prior, task = loaded
    u, v, cond = read(task, torch.arange(8), "cpu")
    z, size = task.encode(u), prior.size(v, cond)
    x = prior.coordinates(z, size)
    assert torch.allclose(prior.latent(x, size), z, atol=1e-4 * float(z.abs().max()))
    other = prior.coordinates(task.encode(1.3 * u), size)
    ratio = (other - x).square().sum((1, 2)) * size**2 / u.square().sum((1, 2, 3))
    assert (ratio / ratio.mean() - 1).abs().max() < 5e-3  # one constant makes it the norm of u


def test_a_mirrored_coefficient_has_the_mirrored_answer(loaded, monkeypatch):
    prior, task = loaded
    chosen = torch.arange(4)
    _, v, _ = read(task, chosen, "cpu")
    assert images(task).tolist() == [[1, 1, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1]]

    def mirrored(t, channels):
        return moved(t[:, None], task.fields, mirror=images(task), channels=channels)

    mean, _ = draw(prior, task, chosen, 2, 1)
    monkeypatch.setattr(task.fields, "inputs", lambda chosen: mirrored(v, ("a",)))
    same, _ = draw(prior, task, chosen, 2, 1)
    assert not torch.allclose(same[1:], mean[1:], rtol=1e-2)
    assert torch.allclose(same, mirrored(mean, ("u",))[:, 0], atol=1e-5 * float(mean.max()))


def test_any_equation_whose_facts_say_steady(tmp_path):
    """-k u'' = f on a circle with u of mean zero: linear in f, k is a parameter, there is a shift.
    """
    generator, n = np.random.default_rng(0), 32
    k, waves = generator.uniform(0.5, 8, 80), np.fft.rfftfreq(n, 1 / n)
    f = generator.normal(size=(80, n // 2 + 1)) + 1j * generator.normal(size=(80, n // 2 + 1))
    f = f * np.where((waves > 0) & (waves < 5), 1, 0) * 10 ** generator.uniform(-0.5, 0.5, (80, 1))
    u = f / np.maximum(waves, 1) ** 2 / k[:, None]
    f, u = (np.fft.irfft(t, n) for t in (f, u))
    write_fields(tmp_path / "poisson.h5", np.stack([0 * u, u], 1), t=[0, 1], channels=["u"],
                 inputs={"f": f}, params={"k": k}, boundary="periodic", shifts="x", steady=True,
                 mirrors="x:; : u f")
    script.main(flags(tmp_path, tmp_path / "poisson.h5", *LONG, "--steps", 140))
    result = json.loads((tmp_path / "run/steady/test.json").read_text())["tasks"]["poisson"]
    assert score(result, "alone") < 0.2 < 0.9 < score(result, "law")
    assert (tmp_path / "run/steady/steady.png").stat().st_size > 10_000


def test_noise_belongs_to_a_member(loaded):
    prior, task = loaded
    (_, few), (_, many) = (draw(prior, task, torch.tensor(chosen), members, 3)
                           for chosen, members in (([5, 7], 3), ([7], 9)))
    assert torch.allclose(few[1], many[0, :3], atol=1e-6) and few[1].std(0).min() > 1e-5


def test_draws_are_scaled_to_the_least_crps_of_the_fit_split(loaded):
    prior, task = loaded
    accelerator, before = Accelerator(cpu=True), prior.scale.clone()

    def error(factor):
        prior.scale.copy_(factor * before)
        forecasts = {"members": steady_forecasts(prior, task, 4, 5)["members"]}
        tables = measure(accelerator, task, forecasts, task.fields.split("fit"), only=("crps",))
        return tables["members"]["crps"].mean().item()

    scores = {factor: error(factor) for factor in (0.6, 0.8, 1.0, 1.25, 1.6)}
    assert min(scores, key=scores.get) == 1.0  # as it was trained and exported
    prior.scale.copy_(0.7 * before)
    calibrate(prior, task, 4, 5)
    assert torch.allclose(prior.scale, before, rtol=0.05)


def test_two_processes_give_the_same_curve(short, tmp_path, data):
    done = launch(ROOT / "train_steady.py", *flags(tmp_path, data))
    assert done.returncode == 0, done.stderr
    one, both = losses(short / "run"), losses(tmp_path / "run")
    assert len(one) == len(both) == 12
    assert max(abs(a - b) for a, b in zip(one, both, strict=True)) < 1e-5
    a, b = (json.loads((folder / "run/steady/test.json").read_text())["tasks"]["darcy2d"]
            for folder in (short, tmp_path))
    a, b = (score(one, "members", "crps") for one in (a, b))
    assert a == pytest.approx(b, rel=1e-3)


def test_resume_is_bit_for_bit(short, tmp_path, data, monkeypatch, capsys):
    """Cut after the deviation's scale was measured."""
    real = script.steady_loss

    def failing(model, batch, **options):
        if len(losses(tmp_path / "run")) == 11:
            raise RuntimeError("cut")
        return real(model, batch, **options)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="cut"):
        patch.setattr(script, "steady_loss", failing)
        script.main(flags(tmp_path, data))
    script.main(flags(tmp_path, data))
    assert "step_10" in capsys.readouterr().out
    assert losses(short / "run") == losses(tmp_path / "run")
    model = "run/steady/model/model.safetensors"
    assert (short / model).read_bytes() == (tmp_path / model).read_bytes()


def test_the_mean_rests_while_what_it_leaves_is_learned(short):
    """In the second act no bit of the mean moves, all of the rest does."""
    folders = [short / f"run/steady/checkpoints/step_{step}" for step in (10, 12)]
    before, after = (load_file(folder / "state.safetensors") for folder in folders)
    moved = {name: not torch.equal(before[name], after[name])
             for name in before if name.startswith(("model/body.", "model/net."))}
    assert {name: name.startswith("model/net.") for name in moved} == moved
    assert len(moved) > 20


def test_a_dry_run(tmp_path, data, capsys):
    with pytest.raises(SystemExit) as end:
        script.main(flags(tmp_path, data, "--dry_run"))
    assert end.value.code == 0 and "all is well." in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["codec"]


@pytest.mark.parametrize("more, words", [
    (["--calls", "1"], "--calls must be at least 2"),
    (["--codec.kind", "grid"], "there is no learned codec yet"),
])
def test_wrong_use_is_one_sentence(tmp_path, data, more, words):
    with pytest.raises(UsageError) as caught:
        script.main(flags(tmp_path, data, *more))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "steady" / "exit.json").exists()
