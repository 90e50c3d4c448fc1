"""The eleven published layouts in miniature, by h5py alone and not by the project's writer."""

import h5py
import numpy as np

N, T, X = 6, 5, 16
TASKS = ("advection1d", "burgers1d", "reacdiff1d", "diffsorp1d", "cns1d", "darcy2d", "diffreact2d",
         "swe2d", "cns2d", "ns2d", "cns3d")


def _centres(lo, hi, n):
    return (lo + (np.arange(n) + 0.5) * (hi - lo) / n).astype("f4")


def build(task, path, samples=N, frames=T, seed=0, **attributes):
    """Write a file of a task; return what it must read as, (N, T, C, *grid)."""
    random = np.random.default_rng(seed)

    def noise(*shape):
        return random.normal(size=shape).astype("f4")

    flow = {"eta": 0.01, "zeta": 0.02, "M": 0.1}
    time = np.arange(frames + 1, dtype="f4") * 0.5  # one more than frames
    with h5py.File(path, "w") as f:
        if task in ("advection1d", "burgers1d", "reacdiff1d"):
            defaults = {"advection1d": {"beta": 0.4}, "burgers1d": {"Nu": 0.01},
                        "reacdiff1d": {"Nu": 0.5, "rho": 2.0}}[task]
            f.attrs.update(defaults | attributes)
            u = noise(samples, frames, 1, X)
            f["tensor"] = u[:, :, 0]
            f["x-coordinate"], f["t-coordinate"] = _centres(0, 1, X), time
        elif task.startswith("cns"):
            dim = int(task[3])
            grid = {1: (X,), 2: (X, 8), 3: (4, 6, 8)}[dim]
            names = ("density", "pressure", "Vx", "Vy", "Vz")[:2 + dim]
            f.attrs.update({k: flow[k] for k in ("eta", "zeta", "M")[:2 + (dim > 1)]} | attributes)
            u = noise(samples, frames, len(names), *grid)
            for c, name in enumerate(names):
                f[name] = u[:, :, c]
            for axis, n in zip("xyz", grid, strict=False):
                f[f"{axis}-coordinate"] = _centres(-1, 1, n)
            f["t-coordinate"] = time
            if dim == 2:  # a few published files carry these too
                f["Vz"], f["z-coordinate"] = noise(samples, frames, *grid), _centres(-1, 1, 4)
        elif task == "darcy2d":
            f.attrs.update({"beta": 1.0} | attributes)
            a, steady = noise(samples, X, X), noise(samples, X, X)
            f["nu"], f["tensor"] = a, steady[:, None]
            f["x-coordinate"] = f["y-coordinate"] = _centres(0, 1, X)
            u = np.stack([0 * steady, steady], 1)[:, :, None]
        elif task == "ns2d":
            u = noise(samples, frames, 3, X, X)
            f["velocity"] = np.moveaxis(u[:, :, :2], 2, -1)
            f["particles"] = np.moveaxis(u[:, :, 2:], 2, -1)
            f["force"] = noise(samples, X, X, 2)
            f["t"] = np.tile(time[:frames], (samples, 1))
            f.attrs["config"] = f"NU: {attributes.get('NU', 0.01)}\nbatch_size: 4\n"
        else:
            grid, channels, config = {
                "diffsorp1d": ((X,), 1, "sim:\n  D: 5e-4\n"),
                "diffreact2d": ((X, 8), 2, "sim:\n  Du: 1e-3\n  Dv: 5e-3\n  k: 5e-3\n"),
                "swe2d": ((X, 8), 1, "sim:\n  dam_radius: 0.5\n"),
            }[task]
            u = noise(samples, frames, channels, *grid)
            for row in range(samples):
                group = f.create_group(f"{row:04d}")
                group["data"] = np.moveaxis(u[row], 1, -1)
                group.attrs["config"] = config
                group["grid/t"] = time[:frames]
                for axis, n in zip("yx" if len(grid) == 2 else "x", grid, strict=True):
                    group[f"grid/{axis}"] = _centres(-1, 1, n)
    return u


def spoil(path, name, sample):
    """Make one sample of a data set unreadable, as a bad block of a disk does."""
    with h5py.File(path, "r+") as f:
        u = f[name][:]
        del f[name]
        f.create_dataset(name, data=u, chunks=(1, *u.shape[1:]), compression="gzip")
        where = f[name].id.get_chunk_info(sample).byte_offset
    with open(path, "r+b") as f:
        f.seek(where)
        f.write(b"\0" * 16)
