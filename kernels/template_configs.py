"""The tiles of the kernels that Inductor compiles from templates, and the choice among them.

Their loads differ from those of the eager kernels. Sizes and strides of weights are constants, which makes
pointers fast; a TMA descriptor is made by each program for itself, which takes about 1.5 microseconds, so
that only tiles for many tokens have them. Costs as in `configs.py`, measured on an NVIDIA H200 (torch 2.11,
triton 3.6) at (H, I) = (4096, 2048), T from 2 to 8192. All tiles have the bits of the eager kernels.
"""

from .configs import FAMILIES, Tile, fastest, fitting, is_valid
from .launch import DeviceFacts


def _pointers(*shape_warps_stages: int, cost: float) -> Tile:
    return Tile(*shape_warps_stages, cost, tma=False)


def _descriptors(*shape_warps_stages: int, cost: float) -> Tile:
    return Tile(*shape_warps_stages, cost)


STATIC = {
    "gate_up": (
        _pointers(64, 16, 256, 4, 4, cost=3.28),
        _pointers(64, 32, 128, 4, 5, cost=4.03),
        _pointers(64, 64, 128, 4, 4, cost=5.15),
        _pointers(128, 64, 64, 8, 5, cost=8.47),
        _pointers(128, 128, 64, 8, 4, cost=14.6),
        _descriptors(128, 128, 64, 8, 4, cost=12.64),
    ),
    "down": (
        _pointers(16, 32, 256, 4, 6, cost=2.44),
        _pointers(64, 32, 256, 4, 4, cost=3.07),
        _pointers(64, 64, 128, 8, 5, cost=3.92),
        _pointers(64, 128, 64, 8, 7, cost=5.25),
        _pointers(128, 128, 64, 8, 6, cost=7.59),
        _pointers(128, 256, 64, 8, 3, cost=13.9),
        _descriptors(64, 128, 128, 8, 4, cost=5.2),
        _descriptors(128, 256, 64, 8, 3, cost=12.11),
    ),
    "swiglu_backward": (
        _pointers(64, 16, 256, 4, 5, cost=2.55),
        _pointers(64, 32, 128, 4, 6, cost=2.77),
        _pointers(64, 64, 128, 8, 6, cost=3.74),
        _pointers(64, 128, 64, 8, 6, cost=4.88),
        _pointers(128, 128, 64, 8, 5, cost=9.4),
        _descriptors(128, 128, 64, 8, 5, cost=8.38),
    ),
    "swiglu_backward_recompute": (
        _pointers(16, 16, 256, 4, 4, cost=4.62),
        _pointers(64, 16, 256, 4, 4, cost=5.55),
        _pointers(64, 32, 128, 4, 4, cost=6.22),
        _pointers(64, 64, 64, 8, 6, cost=8.37),
        _pointers(128, 64, 64, 8, 4, cost=13.13),
        _descriptors(128, 128, 64, 8, 3, cost=19.46),
    ),
    "dx": (
        _pointers(16, 32, 128, 4, 6, cost=2.18),
        _pointers(64, 32, 256, 4, 4, cost=2.92),
        _pointers(64, 64, 64, 4, 8, cost=3.24),
        _pointers(64, 128, 64, 8, 7, cost=4.61),
        _pointers(128, 128, 64, 8, 6, cost=7.0),
        _descriptors(128, 256, 64, 8, 3, cost=11.58),
    ),
}
"""Of kernels for one number of tokens."""

DYNAMIC = {
    "gate_up": (
        _pointers(16, 32, 256, 8, 4, cost=3.66),
        _pointers(64, 16, 128, 8, 8, cost=4.01),
        _pointers(64, 32, 128, 8, 4, cost=4.64),
        _pointers(64, 64, 64, 8, 6, cost=5.95),
        _pointers(128, 64, 64, 8, 5, cost=8.47),
        _pointers(128, 128, 64, 8, 4, cost=14.6),
        _descriptors(128, 128, 64, 8, 4, cost=12.64),
    ),
    "down": (
        _pointers(16, 32, 256, 8, 6, cost=3.07),
        _pointers(64, 32, 256, 8, 4, cost=3.34),
        _pointers(64, 64, 128, 8, 5, cost=3.92),
        _pointers(64, 128, 64, 8, 7, cost=5.25),
        _pointers(128, 128, 64, 8, 6, cost=7.59),
        _pointers(128, 256, 64, 8, 3, cost=13.9),
        _descriptors(128, 256, 64, 8, 3, cost=12.11),
    ),
    "swiglu_backward": (
        _pointers(64, 16, 128, 8, 8, cost=2.75),
        _pointers(64, 32, 64, 8, 8, cost=2.82),
        _pointers(64, 64, 128, 8, 6, cost=3.74),
        _pointers(64, 128, 64, 8, 6, cost=4.88),
        _pointers(128, 128, 64, 8, 5, cost=9.4),
        _descriptors(128, 128, 64, 8, 5, cost=8.38),
    ),
    "swiglu_backward_recompute": (
        _pointers(16, 32, 256, 8, 4, cost=6.1),
        _pointers(64, 16, 128, 8, 8, cost=6.58),
        _pointers(64, 32, 64, 8, 8, cost=6.96),
        _pointers(64, 64, 64, 8, 6, cost=8.37),
        _pointers(128, 64, 64, 8, 4, cost=13.13),
        _descriptors(128, 128, 64, 8, 3, cost=19.46),
    ),
    "dx": (
        _pointers(16, 32, 256, 8, 6, cost=3.08),
        _pointers(64, 32, 128, 8, 8, cost=3.28),
        _pointers(64, 64, 128, 8, 5, cost=3.64),
        _pointers(64, 128, 64, 8, 7, cost=4.61),
        _pointers(128, 128, 64, 8, 6, cost=7.0),
        _descriptors(128, 256, 64, 8, 3, cost=11.58),
    ),
}
"""Of kernels that serve every number of tokens: they share `num_warps`, which belongs to a launch."""


def static_tile(name: str, facts: DeviceFacts, rows: int, columns: int, *, tma: bool) -> Tile:
    """The tile for an output of `rows` x `columns`; arguments as for `configs.choose`."""
    return fastest(_valid(STATIC[name], name, facts, tma), facts, rows, columns)


def static_candidates(name: str, facts: DeviceFacts, rows: int, *, tma: bool) -> list[Tile]:
    """What `max-autotune` benchmarks."""
    return fitting(_valid(STATIC[name], name, facts, tma), rows)


def dynamic_tiles(name: str, facts: DeviceFacts, *, tma: bool) -> list[Tile]:
    """The tiles among which one kernel chooses at run time, by the rule of `configs.fastest`."""
    return _valid(DYNAMIC[name], name, facts, tma)


def _valid(tiles: tuple[Tile, ...], name: str, facts: DeviceFacts, tma: bool) -> list[Tile]:
    """Those that the device can run; of two that differ in their loads alone, the one with descriptors."""
    by_shape = {
        (tile.block_m, tile.block_n): tile for tile in tiles if is_valid(FAMILIES[name], tile, facts, tma=tma)
    }
    return list(by_shape.values())
