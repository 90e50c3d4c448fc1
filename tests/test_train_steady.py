"""The steady stage: from nothing to a table, coordinates, orientations, draws, polish, faults."""

import json
import shutil

import pytest
import torch
from accelerate import Accelerator
from launching import ROOT, launch
from safetensors.torch import load_file

import train_operator
import train_steady as script
from ups.config import UsageError
from ups.data.make import make
from ups.data.solvers import darcy2d
from ups.eval.steady import calibrate, draw, measure_steady, noise_of
from ups.latents import open_tasks
from ups.models.diffusion import multistep, noise_levels
from ups.models.generators import SIGMAS
from ups.models.steady import size_of, turned, turned_back
from ups.steady import load_steady

TINY = ["--steps", "12", "--batch_size", "8", "--log_every", "1", "--eval_every", "6",
        "--save_every", "5", "--warmup", "4", "--patch", "4", "--model.dim", "16", "--model.depth",
        "1", "--model.modes", "4", "--denoiser.dim", "16", "--denoiser.depth", "1",
        "--denoiser.modes", "4", "--members", "4", "--calls", "5", "--table", "1", "5"]
LONG = ["--steps", "240", "--model.dim", "32", "--model.depth", "2", "--batch_size", "16",
        "--eval_every", "80", "--lr", "1e-2", "--log_every", "20"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make("darcy2d", out=folder, samples=60, grid=16)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    """A prior that has learned a little, beside an operator that has learned nothing."""
    folder = tmp_path_factory.mktemp("trained")
    train_operator.main([*flags(folder, data)[:6], "--run", str(folder / "other"), "--tasks",
                         "darcy2d", "--steps", "2", "--model.dim", "16", "--model.depth", "1"])
    fresh()
    script.main(flags(folder, data, *LONG, "--operator", folder / "other"))
    fresh()
    return folder


def fresh():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def flags(folder, data, *more):
    return ["--run", str(folder / "run"), "--data", str(data), "--cache", str(folder / "cache"),
            *TINY, *map(str, more)]


def losses(folder):
    lines = map(json.loads, (folder / "steady" / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.fixture
def loaded(trained):
    """The frozen prior and its task."""
    steady = load_steady(trained / "run")
    (task,) = open_tasks(Accelerator(cpu=True), steady.settings)
    return steady.model, task


def test_from_nothing_to_a_table(trained, data, capsys):
    stage = trained / "run" / "steady"
    test = json.loads((stage / "test.json").read_text())
    result = test["tasks"]["darcy2d"]
    assert "the coefficient is given" in test["definition"]["nrmse"]
    assert result["samples"] == 6 and set(result["val_by_calls"]) == {"1", "5"}
    assert result["nrmse_members"] < 0.5 * result["nrmse_train"]  # better than no network
    assert result["nrmse_codec"] < 2e-3 and result["nrmse_stored"] == 0
    assert result["residual_stored"] < 1e-3 < result["residual_members"]
    assert result["crps"] < result["mae"]  # drawn members say more than the mean alone
    assert 0.4 < result["spread_skill"] < 2.5
    assert result["val_by_calls"]["1"]["spread_skill"] == 0
    assert result["nrmse_refined"] < result["nrmse_zero"] < 0.2
    for mean, zero in zip(result["iterations_refined"], result["iterations_zero"], strict=True):
        assert mean < zero - 0.5
    assert result["nrmse_operator"] > 0.2 and result["residual_operator"] > 0  # two steps only
    assert (stage / "steady.png").stat().st_size > 20_000
    script.main(flags(trained, data, *LONG, "--operator", trained / "other"))
    assert "is finished (step 240)" in capsys.readouterr().out


def test_scores_against_plain_formulas(loaded):
    prior, task = loaded
    chosen = task.fields.split("test")
    tables = measure_steady(Accelerator(cpu=True), prior, task, "test", 4, 3)
    u, noise = task.fields.read(chosen), noise_of(task, chosen, 4)
    _, members = draw(prior, task, u[:, 0], task.cond(chosen), noise, 3)
    truth = u[:, 1, 1]
    for name, p in (("members", members.mean(1)), ("sample", members[:, 0])):
        error = (p - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        assert torch.allclose(tables[f"nrmse_{name}"][:, 0].float(), error, rtol=1e-4)
    near = (members - truth[:, None]).abs().mean()
    apart = (members[:, :, None] - members[:, None]).abs().mean() * 16 / 12  # of distinct pairs
    assert tables["crps"].mean().item() == pytest.approx((near - apart / 2).item(), rel=1e-4)


def test_a_shuffled_coefficient_is_answered_otherwise(loaded):
    prior, task = loaded
    chosen = task.fields.split("test")
    u, noise = task.fields.read(chosen), noise_of(task, chosen, 2)

    def error(frame):
        mean, _ = draw(prior, task, frame, task.cond(chosen), noise, 1)
        return ((mean - u[:, 1, 1]).norm() / u[:, 1, 1].norm()).item()

    assert error(u[:, 0].roll(1, 0)) > 3 * error(u[:, 0])


def test_the_prior_starts_as_the_scaled_mean_of_train(loaded):
    prior, task = loaded
    fresh_prior = type(prior)(script.Config().model, script.Config().denoiser, task.spec)
    fresh_prior.load_state_dict({name: tensor for name, tensor in prior.state_dict().items()
                                 if "." not in name}, strict=False)
    u, chosen = task.fields.read([3, 4]), torch.tensor([3, 4])
    cond, noise = task.cond(chosen), noise_of(task, chosen, 4)
    mean, members = draw(fresh_prior, task, u[:, 0], cond, noise, 4)
    train = task.fields.read(task.fields.split("train"))
    size = train[:, 0, 0].mean((1, 2))  # beta = 1
    scaled = torch.stack([turned(train[:, 1, 1] * size[:, None, None], torch.full((len(train),), t))
                          for t in range(8)]).mean((0, 1))
    expected = scaled / u[:, 0, 0].mean((1, 2))[:, None, None]
    assert ((mean - expected).norm() / expected.norm()).item() < 5e-3  # the codec's error
    # the network is zero, so D(r; sigma) = c_skip r, and a draw is the noise times one number
    z0, flat = task.codec.encode(u[:, 0]), noise[:, 0]
    number = multistep(lambda x, sigma: x / (1 + sigma**2), torch.full((1,), SIGMAS[1]),
                       noise_levels(3, *SIGMAS, rho=20.0))
    assert torch.allclose(fresh_prior.draw(z0, cond, flat, 3), number * prior.scale * flat,
                          atol=1e-6)
    assert members.std(1).min() > 0


def test_coordinates_are_inverted_and_measure_the_field(loaded):
    prior, task = loaded
    u = task.fields.read(torch.arange(8))
    z0, z1 = task.codec.encode(u.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
    size = size_of(u[:, 0, 0], task.cond(torch.arange(8)))
    x = prior.coordinates(z0, z1, size)
    back = task.codec.decode(prior.latent(z0, x, size))
    assert ((back[:, 1] - u[:, 1, 1]).norm() / u[:, 1, 1].norm()).item() < 3e-3
    other = prior.coordinates(z0, z1 + 0.3 * (z1 - z0), size)  # 1.3 u
    ratio = (other - x).square().sum((1, 2)) * size**2 / u[:, 1, 1].square().sum((1, 2))
    assert (ratio / ratio.mean() - 1).abs().max() < 5e-3  # one constant makes it the norm of u


def test_the_mean_has_no_preferred_direction(loaded):
    prior, task = loaded
    chosen, turn = torch.arange(8), torch.arange(8)
    frame, cond = task.fields.read(chosen)[:, 0], task.cond(chosen)
    assert torch.equal(turned_back(turned(frame, turn), turn), frame)
    assert len({tuple(view.flatten().tolist()) for view in
                turned(torch.arange(9.0).view(1, 3, 3).expand(8, 3, 3), turn)}) == 8
    mean, _ = draw(prior, task, frame, cond, noise_of(task, chosen, 2), 1)
    same, _ = draw(prior, task, turned(frame, turn), cond, noise_of(task, chosen, 2), 1)
    assert torch.allclose(same, turned(mean, turn), atol=1e-5 * float(mean.max()))


def test_noise_belongs_to_a_member(loaded):
    _, task = loaded
    few, many = noise_of(task, [5, 7], 3), noise_of(task, [7], 9)
    assert torch.equal(few[1], many[0, :3]) and not torch.equal(few[0], few[1])


def test_draws_are_scaled_to_the_least_crps_of_the_fit_split(loaded):
    prior, task = loaded
    accelerator, before = Accelerator(cpu=True), prior.scale.clone()

    def score(factor):
        prior.scale.copy_(factor * before)
        return measure_steady(accelerator, prior, task, "fit", 4, 5)["crps"].mean().item()

    scores = {factor: score(factor) for factor in (0.6, 0.8, 1.0, 1.25, 1.6)}
    assert min(scores, key=scores.get) == 1.0  # as it was trained and exported
    prior.scale.copy_(0.7 * before)
    calibrate(accelerator, prior, task, 4, 5)
    assert torch.allclose(prior.scale, before, rtol=0.05)


def test_polish_counts_iterations():
    a = darcy2d.initial(4, 32, torch.Generator().manual_seed(1))
    exact = darcy2d.solve(a)
    from_zero, norms = darcy2d.polish(a, tolerance=1e-8)
    assert ((from_zero[-1] - exact).norm() / exact.norm()).item() < 1e-6
    near = exact * 1.01  # the error is one hundredth of that of zero, and so is every norm
    fields, near_norms = darcy2d.polish(a, near, tolerance=1e-8)
    assert torch.allclose(near_norms[:8], norms[:8] / 100, rtol=1e-3)
    assert torch.allclose(fields[0], near)
    lost = ((norms > 1e-4 * norms[0]).sum(0) - (near_norms > 1e-4 * norms[0]).sum(0)).float()
    assert 3 <= lost.mean() <= 9  # at most a factor 0.52 in an iteration, so at least 7 on average


def test_two_processes_give_the_same_curve(tmp_path, data):
    alone = flags(tmp_path, data)
    script.main(alone)
    two = [a.replace(str(tmp_path / "run"), str(tmp_path / "two")) for a in alone]
    done = launch(ROOT / "train_steady.py", *two)
    assert done.returncode == 0, done.stderr
    one, both = losses(tmp_path / "run"), losses(tmp_path / "two")
    assert len(one) == len(both) == 12
    assert max(abs(a - b) for a, b in zip(one, both, strict=True)) < 1e-5
    a, b = (json.loads((tmp_path / n / "steady" / "test.json").read_text())["tasks"]["darcy2d"]
            for n in ("run", "two"))
    assert a["crps"] == pytest.approx(b["crps"], rel=1e-3)


def test_resume_is_bit_for_bit_and_memory_may_run_out(tmp_path, data, monkeypatch, capsys):
    """Cut after the deviation's scale was measured; then once more with memory for four rows."""
    script.main(flags(tmp_path / "whole", data))
    real = script.steady_loss

    def failing(model, batch, **options):
        if len(losses(tmp_path / "cut" / "run")) == 11:
            raise RuntimeError("cut")
        return real(model, batch, **options)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="cut"):
        patch.setattr(script, "steady_loss", failing)
        script.main(flags(tmp_path / "cut", data))
    script.main(flags(tmp_path / "cut", data))
    assert "step_10" in capsys.readouterr().out
    whole, cut = (tmp_path / name / "run" / "steady" for name in ("whole", "cut"))
    assert losses(whole.parent) == losses(cut.parent)
    model = "model/model.safetensors"
    assert (whole / model).read_bytes() == (cut / model).read_bytes()

    def greedy(model, batch, **options):
        if len(batch["rows"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, batch, **options)

    monkeypatch.setattr(script, "steady_loss", greedy)
    script.main(flags(tmp_path / "small", data))
    assert "going on with 4 rows at a time" in capsys.readouterr().err
    pairs = zip(losses(whole.parent), losses(tmp_path / "small" / "run"), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-5


def test_the_mean_rests_while_what_it_leaves_is_learned(tmp_path, data):
    """Steps 9 to 12 are in the second act: no bit of the mean moves, all of the rest does."""
    script.main(flags(tmp_path, data, "--mean_share", 0.5, "--save_every", 4))
    folders = [tmp_path / f"run/steady/checkpoints/step_{step}" for step in (8, 12)]
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
    (["--tasks", "burgers1d"], "one steady task, darcy2d"),
    (["--calls", "1"], "--calls must be at least 2"),
    (["--table", "0"], "--table takes numbers"),
    (["--operator", "nowhere"], "there is no such stage yet"),
    (["--codec", "grid"], "there is no learned codec yet"),
])
def test_wrong_use_is_one_sentence(tmp_path, data, more, words):
    with pytest.raises(UsageError) as caught:
        script.main(flags(tmp_path, data, *more))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "steady" / "exit.json").exists()


def test_a_stage_that_is_not_done_is_refused(trained, tmp_path):
    shutil.copytree(trained / "run" / "steady", tmp_path / "steady")
    end = tmp_path / "steady" / "exit.json"
    end.write_text(end.read_text().replace("done", "stopped"))
    with pytest.raises(UsageError, match="train_steady.py"):
        load_steady(tmp_path)
