"""The seven equations that the package can solve, one module each, by task name.

A module has `PARAMS` (the published default of each PDE parameter), `PRESETS`, and

    initial(count, grid, generator, dtype) -> u0 (count, C, *grid)     drawn on the CPU
    solve(u0, t_end, frames, **params) -> (B, frames, C, *grid)        frame 0 is u0

`solve` runs on u0's device and in its dtype, and a row does not depend on the other rows of its
batch. A preset holds samples, grid (points per axis), frames, t_end, parameters that differ from
PARAMS, and chunk: how many samples are drawn and solved at once. Chunks bound memory (and fit a
CPU cache); 1-D tasks share them, so that their files share initial conditions by index.
darcy2d is steady: `initial` draws the coefficient, and `solve` gives one field.
"""

from . import advection1d, burgers1d, darcy2d, diffreact2d, ns2d, reacdiff1d, swe2d

SOLVERS = dict(advection1d=advection1d, burgers1d=burgers1d, reacdiff1d=reacdiff1d,
               darcy2d=darcy2d, diffreact2d=diffreact2d, swe2d=swe2d, ns2d=ns2d)
