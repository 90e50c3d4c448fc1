"""The eleven PDEBench tasks: what their files hold and how they are published."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    pde: str
    layout: str  # flat, steady, groups or last: see pdebench.py
    axes: tuple[str, ...]  # space axes in stored order
    channels: tuple[str, ...]
    params: dict  # names; the value holds where a file does not say, None: the file must say
    boundary: str | None  # periodic or closed; None: the files differ, so the seam is tested
    file: str  # published name
    test: str  # "first" or "last" tenth of the samples
    domain: tuple[float, float] = (0.0, 1.0)  # of every axis, where a file has no coordinates
    first_frame: int = 0
    given: tuple[str, ...] = ()  # channels that are known beforehand, and no forecast is judged by
    conserved: tuple[str, ...] = ()  # channels whose mean over space the equation keeps
    forced: tuple[str, ...] = ()  # axes along which the equation itself depends on the place
    positive: tuple[str, ...] = ()  # channels that the equation keeps from falling below zero
    # what makes another solution: the axis that is mirrored ("": none), the channels that change
    # sign; swe2d has none, as its fields are their own mirror images
    mirrors: dict = field(default_factory=dict)
    linear: bool = False  # sums of solutions are solutions
    solenoidal: bool = False  # the velocity, channels Vx, Vy, .., has no divergence


def judged(spec):
    """Channels by which a forecast is judged: all that are not given."""
    return [c for c, name in enumerate(spec.channels) if name not in TASKS[spec.task].given]


_CNS = "compressible Navier-Stokes, shear viscosity eta, bulk viscosity zeta"
_FLOW = {"eta": None, "zeta": None, "M": None}
TASKS = {
    "advection1d": Task("u_t + beta u_x = 0", "flat", ("x",), ("u",), {"beta": None}, "periodic",
                        "1D_Advection_Sols_beta{beta}.hdf5", "first", conserved=("u",),
                        mirrors={"": ("u",)}, linear=True),
    "burgers1d": Task("u_t + (u^2/2)_x = (nu/pi) u_xx", "flat", ("x",), ("u",), {"nu": None},
                      "periodic", "1D_Burgers_Sols_Nu{nu}.hdf5", "first", conserved=("u",),
                      mirrors={"x": ("u",)}),
    "reacdiff1d": Task("u_t = nu u_xx + rho u (1 - u)", "flat", ("x",), ("u",),
                       {"nu": None, "rho": None}, "periodic", "ReacDiff_Nu{nu}_Rho{rho}.hdf5",
                       "first", positive=("u",), mirrors={"x": ()}),
    "diffsorp1d": Task("u_t = D/R(u) u_xx", "groups", ("x",), ("u",), {}, "closed",
                       "1D_diff-sorp_NA_NA.h5", "last", positive=("u",)),
    "cns1d": Task(_CNS, "flat", ("x",), ("density", "pressure", "Vx"), {"eta": None, "zeta": None},
                  None, "1D_CFD_Rand_Eta{eta}_Zeta{zeta}_periodic_Train.hdf5", "first",
                  positive=("density", "pressure"), mirrors={"x": ("Vx",)}),
    "darcy2d": Task("div(a grad u) + beta = 0", "steady", ("x", "y"), ("a", "u"), {"beta": None},
                    "closed", "2D_DarcyFlow_beta{beta}_Train.hdf5", "first", given=("a",),
                    positive=("a", "u"), mirrors={"x": (), "y": ()}),
    "diffreact2d": Task("u_t = Du lap u + u - u^3 - k - v, v_t = Dv lap v + u - v", "groups",
                        ("y", "x"), ("u", "v"), {"Du": 1e-3, "Dv": 5e-3, "k": 5e-3}, "closed",
                        "2D_diff-react_NA_NA.h5", "last", (-1.0, 1.0), first_frame=10,
                        mirrors={"x": (), "y": ()}),
    "swe2d": Task("shallow water, radial dam break, outflow", "groups", ("y", "x"), ("h",), {},
                  "closed", "2D_rdb_NA_NA.h5", "last", (-2.5, 2.5), positive=("h",)),
    "cns2d": Task(_CNS, "flat", ("x", "y"), ("density", "pressure", "Vx", "Vy"), _FLOW, "periodic",
                  "2D_CFD_Rand_M{M}_Eta{eta}_Zeta{zeta}_periodic_128_Train.hdf5", "first",
                  conserved=("density",), positive=("density", "pressure"),
                  mirrors={"x": ("Vx",), "y": ("Vy",)}),
    "ns2d": Task("incompressible Navier-Stokes with a body force, viscosity nu", "last",
                 ("y", "x"), ("Vx", "Vy"), {"nu": 0.01}, "closed", "ns_incom_2d_Nu{nu}.h5", "last",
                 forced=("y",), solenoidal=True),
    "cns3d": Task(_CNS, "flat", ("x", "y", "z"), ("density", "pressure", "Vx", "Vy", "Vz"), _FLOW,
                  "periodic", "3D_CFD_Rand_M{M}_Eta{eta}_Zeta{zeta}_periodic_Train.hdf5", "first",
                  conserved=("density",), positive=("density", "pressure"),
                  mirrors={"x": ("Vx",), "y": ("Vy",), "z": ("Vz",)}),
}
