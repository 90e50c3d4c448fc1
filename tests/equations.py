"""Six equations that no part of the package knows, solved in numpy and stored as users store them.

Each function writes a data set and returns (path, flags, u), u (N, T, C, *grid) as stored.
"""

import h5py
import numpy as np
import yaml

from ups.data import write_fields


def smooth(rng, n, *grid, waves=3):
    """Random periodic fields (n, *grid) of the longest waves, of deviation one."""
    u = np.zeros((n, *grid))
    places = np.meshgrid(*(2 * np.pi * np.arange(size) / size for size in grid), indexing="ij")
    for _ in range(8):
        k = rng.integers(-waves, waves + 1, (len(grid), n, *[1] * len(grid)))
        u += np.cos(sum(a * x for a, x in zip(k, places, strict=True))
                    + rng.uniform(0, 2 * np.pi, (n, *[1] * len(grid))))
    return u / 2


def hdf5(path, variables, coordinates=None, **attributes):
    """Write {name: (axes, values)} with dimension scales, as netCDF-4 does."""
    with h5py.File(path, "w") as f:
        for axis, values in (coordinates or {}).items():
            f[axis] = values
            f[axis].make_scale(axis)
        for name, (axes, values) in variables.items():
            f[name] = values
            for k, axis in enumerate(axes.split()):
                if axis not in f:  # no coordinate: big-endian zeros, as netCDF writes them
                    f.create_dataset(axis, (values.shape[k],), ">f4")
                    f[axis].make_scale(f"This is a netCDF dimension but not a netCDF variable. {k}")
                f[name].dims[k].attach_scale(f[axis])
        f.attrs.update(attributes)
    return path


def kdv(folder, n=40, points=64, frames=11):
    """u_t + u u_x + d^2 u_xxx = 0: an .npz of bare arrays; integrating factor, Runge-Kutta 4."""
    rng, h, steps = np.random.default_rng(0), 2e-3, 25
    k = np.pi * np.arange(points // 2 + 1)
    half = np.exp(1j * 0.06**2 * k**3 * h / 2)
    wave = -0.5j * k * (k < 2 / 3 * k[-1])

    def change(v):
        return wave * np.fft.rfft(np.fft.irfft(v, points) ** 2)

    v, out = np.fft.rfft(0.7 * smooth(rng, n, points)), []
    for step in range(steps * frames):
        if step % steps == 0:
            out.append(np.fft.irfft(v, points))
        a = change(v)
        b = change(half * (v + h / 2 * a))
        c = change(half * v + h / 2 * b)
        d = change(half * (half * v + h * c))
        v = half * (half * (v + h / 6 * a) + h / 3 * (b + c)) + h / 6 * d
    u = np.stack(out, 1).astype("f4")
    np.savez(folder / "kdv.npz", u=u, t=h * steps * np.arange(frames),
             x=(np.arange(points) + 0.5) * 2 / points)
    return folder / "kdv.npz", ["--axes", "sample time x"], u[:, :, None]


def allen_cahn(folder, n=40, points=64, frames=9):
    """u_t = nu u_xx + 5 (u - u^3), nu of each sample; two exact flows after Strang."""
    rng, h, steps = np.random.default_rng(1), 0.005, 10
    nu = 10 ** rng.uniform(-3.5, -2, n)
    decay = np.exp(-nu[:, None] * (2 * np.pi * np.arange(points // 2 + 1)) ** 2 * h)
    u, out = 0.6 * smooth(rng, n, points), []
    for step in range(steps * frames):
        if step % steps == 0:
            out.append(u)
        for again in (True, False):
            u = u / np.sqrt(u**2 + (1 - u**2) * np.exp(-5 * h))
            u = np.fft.irfft(np.fft.rfft(u) * decay, points) if again else u
    u = np.stack(out, 1)
    path = write_fields(folder / "allen_cahn.h5", u, dt=h * steps, channels="phi",
                        boundary="periodic", mirrors="x:; : phi", params={"nu": nu})
    return path, [], u[:, :, None]


def advection_diffusion(folder, n=40, grid=(24, 16), frames=9):
    """c_t + v . grad c = D lap c, v given and fixed, walls in y: netCDF with dimension scales."""
    (nx, ny), rng, h, steps = grid, np.random.default_rng(2), 0.004, 10
    x, y = np.arange(nx) / nx, np.arange(ny + 1) / ny
    psi = np.zeros((n, nx, ny + 1))  # at the corners: the flow through the faces has no divergence
    for k in (1, 2):
        phase = rng.uniform(0, 2 * np.pi, (n, 1, 1))
        psi += (rng.normal(size=(n, 1, 1)) / k * np.sin(2 * np.pi * k * x[:, None] + phase)
                * np.sin(np.pi * y)) / 4
    across_x = np.diff(psi, axis=2) * ny                     # through the left face of a cell
    across_y = (psi - np.roll(psi, -1, 1))[:, :, 1:-1] * nx  # through the inner faces along y
    D = 0.005

    def rate(c):
        left = np.roll(c, 1, 1)
        fx = across_x * (c + left) / 2 - D * nx * (c - left)
        fy = across_y * (c[:, :, 1:] + c[:, :, :-1]) / 2 - D * ny * np.diff(c, axis=2)
        fy = np.pad(fy, ((0, 0), (0, 0), (1, 1)))
        return -nx * (np.roll(fx, -1, 1) - fx) - ny * np.diff(fy, axis=2)

    c, out = smooth(rng, n, nx, 2 * ny, waves=2)[:, :, :ny], []
    for step in range(steps * frames):
        if step % steps == 0:
            out.append(c)
        a = rate(c)
        b = rate(c + h / 2 * a)
        d = rate(c + h / 2 * b)
        c = c + h / 6 * (a + 2 * b + 2 * d + rate(c + h * d))
    c = np.stack(out, 1).astype("f4")
    path = hdf5(folder / "advected.nc", {
        "c": ("sample time x y", c),
        "vx": ("sample x y", ((across_x + np.roll(across_x, -1, 1)) / 2).astype("f4")),
        "vy": ("sample x y", (nx * np.diff(-psi, axis=1, append=-psi[:, :1])[:, :, 1:]
                              ).astype("f4"))},
        {"sample": np.arange(n), "time": h * steps * np.arange(frames), "x": x + 0.5 / nx,
         "y": (np.arange(ny) + 0.5) / ny},
        boundary="periodic closed", inputs="vx vy", conserved="c")
    return path, [], c[:, :, None]


def gray_scott(folder, n=40, points=24, frames=9):
    """Two species, F and k of each sample: one array (N, T, X, Y, C), and a YAML beside it."""
    rng = np.random.default_rng(3)
    feed, kill = rng.uniform(0.03, 0.05, (n, 1, 1)), rng.uniform(0.053, 0.058, (n, 1, 1))
    blobs = np.clip(smooth(rng, n, points, points, waves=2), 0, 1)
    u, v, out = 1 - 0.5 * blobs, 0.3 * blobs, []

    def lap(a):
        return sum(np.roll(a, s, k) for k in (1, 2) for s in (1, -1)) - 4 * a

    for step in range(20 * frames):
        if step % 20 == 0:
            out.append(np.stack([u, v], -1))
        reaction = u * v**2
        u, v = (u + 0.16 * lap(u) - reaction + feed * (1 - u),
                v + 0.08 * lap(v) + reaction - (feed + kill) * v)
    fields = np.stack(out, 1).astype("f4")
    np.savez(folder / "gray_scott.npz", fields=fields, F=feed.ravel(), k=kill.ravel())
    facts = {"channels": "u v", "boundary": "periodic periodic", "dt": 20, "positive": "u v",
             "domain": f"0 {points} 0 {points}", "mirrors": "x:; y:"}
    (folder / "gray_scott.yaml").write_text(yaml.safe_dump(facts))
    return (folder / "gray_scott.npz", ["--axes", "sample time x y channel"],
            np.moveaxis(fields, -1, 2))


def diffusion3d(folder, n=20, points=24, frames=5):
    """u_t = 0.02 lap u: a folder with an array for each trajectory; exact in Fourier space."""
    rng, folder = np.random.default_rng(4), folder / "diffusion3d"
    folder.mkdir()
    k = 2 * np.pi * np.fft.fftfreq(points, 1 / points)
    square = sum(a**2 for a in np.meshgrid(k, k, k[:points // 2 + 1], indexing="ij"))
    decay = np.exp(-0.02 * square * 0.1 * np.arange(frames)[:, None, None, None])
    u0 = smooth(rng, n, points, points, points, waves=2)
    u = np.fft.irfftn(np.fft.rfftn(u0, axes=(1, 2, 3))[:, None] * decay, (points,) * 3,
                      axes=(2, 3, 4)).astype("f4")
    for row, values in enumerate(u):
        np.save(folder / f"{row}.npy", values)
    (folder.parent / "diffusion3d.yaml").write_text(yaml.safe_dump(
        {"boundary": "periodic periodic periodic", "dt": 0.1, "linear": True, "channels": "u"}))
    return folder, ["--axes", "time x y z"], u[:, :, None]


def write_well(path, name, axes, time, points, boundary, ranks, scalars):
    """A file as The Well publishes them.

    axes: such as "xy". points, boundary: one for each of them. ranks: {name: (values, sample, time,
    dims)} for t0, t1 and t2 fields; scalars alike, without dims: what varies along which axis.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as f:
        numbers = {key: values for key, (values, *varies) in scalars.items() if varies[1] is False}
        f.attrs.update(dataset_name=name, grid_type="cartesian", n_spatial_dims=len(axes),
                       n_trajectories=len(next(iter(ranks[0].values()))[0]),
                       simulation_parameters=[*numbers],
                       **{key: np.ravel(values)[0] for key, values in numbers.items()})
        f.create_group("dimensions").attrs["spatial_dims"] = [*axes]
        for axis, values in (("time", time), *zip(axes, points, strict=True)):
            f["dimensions"][axis] = np.asarray(values, "f4")
            f["dimensions"][axis].attrs["sample_varying"] = values.ndim > 1
        for axis, kind, values in zip(axes, boundary, points, strict=True):
            one = f.create_group(f"boundary_conditions/{axis}_{kind}")
            one.attrs.update(associated_dims=[axis] if kind.isupper() else axis, bc_type=kind,
                             associated_fields=[], sample_varying=False, time_varying=False)
            one["mask"] = np.arange(len(values)) % (len(values) - 1) == 0
        groups = {f"t{rank}_fields": fields for rank, fields in enumerate(ranks)}
        for group, fields in (groups | {"scalars": scalars}).items():
            f.create_group(group).attrs["field_names"] = [*fields]
            for key, (values, sample, in_time, *dims) in fields.items():
                f[group][key] = np.asarray(values, "f4")
                f[group][key].attrs.update(sample_varying=sample, time_varying=in_time,
                                           dim_varying=dims or [True] * len(axes))


def convection(folder, grid=(24, 16), counts=(20, 4, 6)):
    """Waves between two walls that drift at alpha < 0, in the files of The Well."""
    rng, (nx, ny), all_u = np.random.default_rng(5), grid, []
    x, y = np.arange(nx) / nx, (np.arange(ny) + 0.5) / ny
    for split, count in zip(("train", "valid", "test"), counts, strict=True):
        for alpha, frames in ((-1.0, 9), (-0.4, 5)):
            t = 0.1 * np.arange(frames)
            b, vx, vy = np.zeros((3, count, frames, nx, ny))
            for k in (1, 2):
                phase = 2 * np.pi * k * (x - alpha * t[:, None])[..., None]
                phase = phase + rng.uniform(0, 2 * np.pi, (count, 1, 1, 1))
                size = rng.normal(size=(count, 1, 1, 1)) * np.exp(-k * t / 2)[:, None, None]
                b += size * np.cos(phase) * np.sin(np.pi * y)
                vx += size * np.sin(phase) * np.cos(np.pi * y)
                vy -= 2 * k * size * np.cos(phase) * np.sin(np.pi * y)
            write_well(folder / f"convection/data/{split}/convection_{alpha}.hdf5", "convection",
                       "xy", t, (x, y), ("PERIODIC", "WALL"),
                       ({"buoyancy": (b, True, True)},
                        {"velocity": (np.stack([vx, vy], -1), True, True)}, {}),
                       {"alpha": (alpha, False, False)})
            if split == "test":
                all_u.append(np.stack([b, vx, vy], 2)[:, :5])
    return folder / "convection", [], np.concatenate(all_u)
