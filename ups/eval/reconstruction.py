"""What a codec loses: the error of decode(encode(u)), on its grid and at points between."""

import math

import torch

from ups.data.fields import Fields
from ups.eval.metrics import NRMSE
from ups.eval.plots import draw_codec, picture
from ups.models.codec import compare_at, truncate
from ups.relative_error import mean_relative_error

FINE = 8  # trajectories on which any-point decoding is judged


@torch.no_grad()
def measure_codec(accelerator, codec, fields, split):
    """nRMSE over all frames of a split; every rank takes its share."""
    device, world = accelerator.device, accelerator.num_processes
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum, count
    for u in fields.stream(fields.split(split)[accelerator.process_index::world], megabytes=16):
        u = u.to(device)
        errors = mean_relative_error(codec.decode(codec.encode(u)), u)
        total += torch.stack([errors.double().sum(), errors.new_tensor(len(errors)).double()])
    total = accelerator.reduce(total, reduction="sum")
    return float(total[0] / total[1])


@torch.no_grad()
def measure_points(codec, fields):
    """nRMSE of fields read at every point of the stored grid, from the thinned grid of the codec.

    `decode_at` sees the latents; the two interpolations see the true values on the thinned grid.
    """
    stored = Fields(fields.files, 1, fields.frames.step, fields.frames.start)
    chosen = fields.split("test")[:FINE]
    u, fine = fields.read(chosen).flatten(0, 1), stored.read(chosen).flatten(0, 1)
    device = codec.weight.device
    axes = [(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in fine.shape[2:]]
    points = torch.cartesian_prod(*axes).view(-1, len(axes)).to(device)  # of all values, in [0, 1]
    parts = [compare_at(codec, coarse.to(device), points, true.to(device)) for coarse, true in
             zip(u.split(32), fine.flatten(2).mT.split(32), strict=True)]
    return {name: float(torch.cat([part[name] for part in parts]).mean()) for name in parts[0]}


@torch.no_grad()
def finish_codec(run, codec, task):
    """Test once, beside the patch codec of the same width; table, `test.json` and picture."""
    spec, fields = codec.spec, task.fields
    patch = truncate(task.codec, spec.width).to(codec.weight.device)
    values = len(spec.channels) * math.prod(spec.grid)
    result = {"compression": values / (math.prod(spec.tokens) * spec.width),
              "width": spec.width, "tokens": list(spec.tokens)}
    for name, one in (("grid", codec), ("patch", patch)):
        result[f"nrmse_{name}"] = measure_codec(run.accelerator, one, fields, "test")
    if not run.accelerator.is_main_process:
        return
    ratio = result["nrmse_patch"] / result["nrmse_grid"]
    print(f"\n{spec.name}: test nRMSE of decode(encode(u)), {result['compression']:.3g} field "
          f"values per latent value\ngrid codec  {result['nrmse_grid']:.2e}\n"
          f"patch codec {result['nrmse_patch']:.2e}   ({ratio:.2f} times)")
    if fields.stride_x > 1:
        result["any_point"] = measure_points(codec, fields)
        print(f"read at all {fields.stride_x * spec.grid[0]} points per axis: " + ", ".join(
            f"{name} {value:.2e}" for name, value in result["any_point"].items()))
    run.write("test.json", {"definition": NRMSE.split(";")[0], "split": "test",
                            "tasks": {spec.name: result}})
    u = fields.read(fields.split("test")[:1])[0, :: max(1, fields.facts.frames // 3)][:3]
    u = u.to(codec.weight.device)
    picture(run.folder / "codec.png", draw_codec, fields.facts, u, codec.decode(codec.encode(u)),
            patch.decode(patch.encode(u)))
