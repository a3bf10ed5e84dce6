"""The tiles of every kernel family, and the choice among them by shape, device and number of tokens.

No tuning happens at run time. A tile's cost was measured on an NVIDIA H200 (torch 2.11, triton 3.6): the
time that one wave of tiles takes per 1024 of k, over (H, I) = (4096, 2048), (7168, 2048), (2048, 768) and T
from 1 to 8192. `choose` takes the valid tile with the least `waves * cost`; over those 33 points that was on
average 1 % from the best tile tried. Tiles of twice the rows or more are left out: descriptors are slow where
most of a tile lies outside. All tiles of a profile have the same bits: the choice is one of speed alone.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton

from .launch import DeviceFacts


@dataclass(frozen=True)
class Tile:
    """One way to cut an output.

    Attributes:
        block_m, block_n, block_k: rows (tokens), columns and k of a tile.
        num_warps, num_stages: Triton's.
        cost: microseconds of one wave per 1024 of k (H200).
        tma: whether operands come through TMA descriptors.
        blocks: thread blocks per multiprocessor.
        group_m: row tiles that are walked down before the next column of tiles.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    cost: float
    tma: bool = True
    blocks: int = 1
    group_m: int = 8

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "TMA": self.tma,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    @property
    def epilogue_n(self) -> int:
        """Columns of the parts in which the epilogues of SwiGLU and of its backward run."""
        return self.block_n if self.block_n < 128 else self.block_n // 2

    def count(self, rows: int, columns: int) -> int:
        """How many tiles cover an output of `rows` x `columns`."""
        return triton.cdiv(rows, self.block_m) * triton.cdiv(columns, self.block_n)

    def grid(self, facts: DeviceFacts, rows: int, columns: int) -> tuple[int]:
        """Persistent: as many programs as run at once, or fewer."""
        return (min(self.count(rows, columns), facts.multiprocessors * self.blocks),)

    def waves(self, facts: DeviceFacts, rows: int, columns: int) -> int:
        """How many tiles one after the other the busiest program computes."""
        return triton.cdiv(self.count(rows, columns), facts.multiprocessors * self.blocks)


@dataclass(frozen=True)
class Family:
    """One kernel's tiles.

    Attributes:
        weights: how many weight tiles a step of k loads.
        outputs: how many tensors it stores.
        in_halves: whether its epilogue runs in parts of `Tile.epilogue_n` columns.
        fast, strict: the tiles of `tc-fp32-v1` and of `fp32-serial-v1`.
    """

    weights: int
    outputs: int
    in_halves: bool
    fast: tuple[Tile, ...]
    strict: tuple[Tile, ...]

    def shared_memory(self, tile: Tile, output_bytes: int = 2) -> int:
        """Bytes a block needs at most: the bf16 operand tiles of the pipeline and, with TMA, the outputs."""
        stage = (tile.block_m + self.weights * tile.block_n) * tile.block_k * 2
        columns = tile.epilogue_n if self.in_halves else tile.block_n
        staged = self.outputs * tile.block_m * columns * output_bytes if tile.tma else 0
        return stage * tile.num_stages + staged + 1024


FAMILIES = {
    "gate_up": Family(
        weights=2,
        outputs=1,
        in_halves=True,
        fast=(
            Tile(16, 16, 256, 2, 6, 2.90, tma=False),
            Tile(32, 16, 256, 4, 4, 3.00),
            Tile(64, 16, 256, 4, 4, 2.99),
            Tile(64, 32, 128, 4, 4, 4.10),
            Tile(64, 64, 128, 4, 4, 4.80),
            Tile(64, 64, 64, 4, 4, 7.07, blocks=2),
            Tile(128, 128, 64, 8, 4, 11.57),
            Tile(64, 64, 64, 4, 3, 9.0, tma=False),
            Tile(128, 64, 64, 8, 3, 10.6, tma=False),
        ),
        strict=(
            Tile(16, 16, 32, 4, 3, 62, tma=False),
            Tile(16, 64, 32, 4, 3, 113, tma=False),
            Tile(128, 64, 16, 8, 3, 341, tma=False),
        ),
    ),
    "down": Family(
        weights=1,
        outputs=1,
        in_halves=False,
        fast=(
            Tile(16, 16, 256, 2, 6, 2.34, tma=False),
            Tile(16, 64, 128, 4, 6, 4.16, tma=False),
            Tile(32, 64, 128, 4, 6, 5.80),
            Tile(64, 32, 256, 4, 4, 2.86),
            Tile(64, 64, 128, 4, 5, 4.02),
            Tile(64, 128, 128, 4, 4, 4.96),
            Tile(128, 128, 64, 8, 6, 6.86),
            Tile(128, 256, 64, 8, 3, 12.05),
            Tile(64, 64, 64, 4, 3, 6.5, tma=False),
            Tile(128, 128, 64, 8, 3, 10.3, tma=False),
        ),
        strict=(
            Tile(16, 32, 64, 4, 3, 55, tma=False),
            Tile(32, 64, 32, 4, 3, 97, tma=False),
            Tile(128, 128, 16, 8, 3, 242, tma=False),
        ),
    ),
    "swiglu_backward": Family(
        weights=1,
        outputs=2,
        in_halves=True,
        fast=(
            Tile(16, 32, 256, 2, 6, 2.40),
            Tile(64, 16, 256, 4, 5, 2.73),
            Tile(64, 32, 128, 4, 6, 3.09),
            Tile(64, 64, 128, 4, 6, 3.56),
            Tile(64, 128, 128, 4, 4, 5.19),
            Tile(64, 128, 64, 4, 4, 7.68, blocks=2),
            Tile(128, 128, 64, 8, 5, 7.52),
            Tile(16, 32, 256, 4, 4, 2.55, tma=False),
            Tile(64, 64, 64, 8, 3, 7.3, tma=False),
        ),
        strict=(
            Tile(16, 16, 32, 4, 3, 26, tma=False),
            Tile(16, 64, 32, 4, 3, 38, tma=False),
            Tile(128, 128, 16, 8, 3, 137, tma=False),
        ),
    ),
    "swiglu_backward_recompute": Family(
        weights=2,
        outputs=2,
        in_halves=True,
        fast=(
            Tile(16, 16, 256, 2, 4, 5.06),
            Tile(32, 16, 256, 4, 4, 5.40),
            Tile(64, 16, 256, 4, 4, 5.34),
            Tile(64, 32, 128, 4, 6, 6.17),
            Tile(64, 64, 128, 4, 4, 7.89),
            Tile(64, 64, 64, 4, 4, 12.02, blocks=2),
            Tile(128, 128, 64, 8, 3, 20.72),
            Tile(16, 32, 256, 4, 4, 5.6, tma=False),
            Tile(64, 32, 64, 4, 3, 13.8, tma=False),
        ),
        strict=(
            Tile(16, 16, 32, 4, 3, 88, tma=False),
            Tile(16, 64, 32, 4, 3, 150, tma=False),
            Tile(64, 128, 16, 8, 3, 429, tma=False),
        ),
    ),
    "dx": Family(
        weights=1,
        outputs=1,
        in_halves=False,
        fast=(
            Tile(16, 64, 256, 4, 4, 3.95),
            Tile(32, 64, 128, 4, 6, 5.80),
            Tile(64, 32, 256, 4, 4, 3.32),
            Tile(64, 64, 128, 4, 5, 3.83),
            Tile(64, 128, 64, 4, 7, 4.82),
            Tile(128, 128, 64, 8, 6, 6.59),
            Tile(128, 256, 64, 8, 3, 11.27),
            Tile(16, 32, 128, 4, 6, 4.10, tma=False),
            Tile(64, 64, 64, 4, 3, 7.3, tma=False),
            Tile(128, 128, 64, 8, 3, 9.9, tma=False),
        ),
        strict=(
            Tile(16, 32, 64, 4, 3, 31, tma=False),
            Tile(32, 64, 32, 4, 3, 48, tma=False),
            Tile(128, 128, 16, 8, 3, 130, tma=False),
        ),
    ),
}


def is_valid(family: Family, tile: Tile, facts: DeviceFacts, *, tma: bool, output_bytes: int = 2) -> bool:
    """Whether the device can run the tile.

    Args:
        family, tile, facts: the kernel, its tile, the device.
        tma: whether the operands' layout allows descriptors.
        output_bytes: of one element of the output.
    """
    if tile.tma and not (tma and facts.has_tma):
        return False
    return family.shared_memory(tile, output_bytes) * tile.blocks <= facts.shared_memory


@functools.lru_cache(maxsize=4096)
def choose(
    name: str,
    facts: DeviceFacts,
    rows: int,
    columns: int,
    *,
    strict: bool,
    tma: bool,
    output_bytes: int = 2,
) -> Tile:
    """The tile for an output of `rows` x `columns`.

    Args:
        name: of the family.
        rows, columns: of the output.
        strict: the tiles of `fp32-serial-v1`, else those of `tc-fp32-v1`.
        tma: whether the operands' layout allows descriptors.
        output_bytes: of one element of the output.
    """
    family = FAMILIES[name]
    valid = [
        tile
        for tile in tiles(name, strict=strict)
        if is_valid(family, tile, facts, tma=tma, output_bytes=output_bytes)
    ]
    return fastest(valid, facts, rows, columns)


def fastest(tiles: Sequence[Tile], facts: DeviceFacts, rows: int, columns: int) -> Tile:
    """The tile with the least `waves * cost` for an output of `rows` x `columns`."""
    return min(fitting(tiles, rows), key=lambda tile: tile.waves(facts, rows, columns) * tile.cost)


def fitting(tiles: Sequence[Tile], rows: int) -> list[Tile]:
    """Those that are not much taller than an output of `rows`."""
    smallest = min(tile.block_m for tile in tiles)
    return [tile for tile in tiles if tile.block_m < max(2 * rows, smallest + 1)]


def tiles(name: str, *, strict: bool) -> tuple[Tile, ...]:
    """All tiles of a family."""
    family = FAMILIES[name]
    return family.strict if strict else family.fast
