"""The tiles of the MoE layer's kernels, and the choice by rows per expert and device. No tuning at run time.

All tiles of a profile have the same bits. fp8 products need `wgmma`, whose M is at least 64: tiles with fewer
rows than that put the weight on the M side (`swap`). Measured on an NVIDIA H200 (torch 2.11, triton 3.6).
"""

import functools
from dataclasses import dataclass
from typing import Any

import triton

from .launch import DeviceFacts


@dataclass(frozen=True)
class MoeTile:
    """One way to cut a grouped product.

    Attributes:
        block_m, block_n, block_k: rows, columns and k of a tile.
        num_warps, num_stages: Triton's.
        blocks: thread blocks per multiprocessor.
        swap: whether the product is computed transposed, the weight being the first operand.
        tma: whether operands come through TMA descriptors.
        group_m: row tiles that are walked down before the next column of tiles.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    blocks: int = 1
    swap: bool = False
    tma: bool = True
    group_m: int = 8

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "SWAP": self.swap,
            "TMA": self.tma,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    def grid(self, facts: DeviceFacts, rows: int, experts: int, columns: int) -> tuple[int]:
        """Persistent: as many programs as run at once, or as there can be tiles."""
        row_tiles = min(rows, triton.cdiv(rows, self.block_m) + experts)
        return (min(row_tiles * triton.cdiv(columns, self.block_n), facts.multiprocessors * self.blocks),)


@dataclass(frozen=True)
class Family:
    """One kernel's tiles for one format of weights.

    Attributes:
        weights: how many weight tiles a step of k loads.
        row_bytes, weight_bytes: of one element of the rows and of the weight.
        tiles: (most rows per expert, tile), ascending; the last one is for any number.
    """

    weights: int
    row_bytes: int
    weight_bytes: int
    tiles: tuple[tuple[float, MoeTile], ...]

    def shared_memory(self, tile: MoeTile) -> int:
        """Bytes a block needs at most: the tiles of the pipeline and, where fp8 is widened, one bf16 tile.

        A weight that is widened passes through registers, so that its pipeline is one tile shorter.
        """
        widens = self.weight_bytes < self.row_bytes
        rows = tile.block_m * tile.block_k * self.row_bytes * tile.num_stages
        weight = tile.block_n * tile.block_k * self.weight_bytes
        shorter = widens and self.weights == 1  # where two weights share the kernel, one is not widened
        weights = self.weights * weight * (tile.num_stages - shorter)
        widened = tile.block_n * tile.block_k * self.row_bytes if widens and not tile.swap else 0
        return rows + weights + widened + 1024


_ANY = float("inf")

FAMILIES = {
    "gate_up_fp8": Family(
        weights=2,
        row_bytes=1,
        weight_bytes=1,
        tiles=(
            (4, MoeTile(16, 64, 128, 4, 3, blocks=4, swap=True)),
            (16, MoeTile(16, 64, 128, 4, 4, blocks=3, swap=True)),
            (24, MoeTile(32, 64, 128, 4, 3, blocks=3, swap=True)),
            (700, MoeTile(64, 64, 128, 4, 3, blocks=3)),
            (_ANY, MoeTile(128, 128, 128, 8, 3)),
            (_ANY, MoeTile(64, 64, 128, 4, 3, tma=False)),
        ),
    ),
    "gate_up_fp8_wide": Family(  # scale groups of 128 columns
        weights=2,
        row_bytes=1,
        weight_bytes=1,
        tiles=(
            (8, MoeTile(16, 128, 128, 4, 3, blocks=2, swap=True)),
            (32, MoeTile(32, 128, 128, 4, 2, blocks=2, swap=True)),
            (64, MoeTile(64, 128, 128, 8, 4)),
            (_ANY, MoeTile(128, 128, 128, 8, 3)),
            (_ANY, MoeTile(64, 128, 128, 8, 3, tma=False)),
        ),
    ),
    "down_fp8_64": Family(
        weights=1,
        row_bytes=1,
        weight_bytes=1,
        tiles=(
            (8, MoeTile(16, 128, 64, 4, 5, blocks=4, swap=True)),
            (32, MoeTile(32, 128, 64, 4, 5, blocks=3, swap=True)),
            (_ANY, MoeTile(64, 128, 64, 4, 6, blocks=2)),
            (_ANY, MoeTile(64, 128, 64, 4, 4, tma=False)),
        ),
    ),
    "down_fp8_128": Family(
        weights=1,
        row_bytes=1,
        weight_bytes=1,
        tiles=(
            (8, MoeTile(16, 128, 128, 4, 4, blocks=3, swap=True)),
            (32, MoeTile(32, 128, 128, 4, 3, blocks=3, swap=True)),
            (_ANY, MoeTile(64, 128, 128, 4, 4, blocks=2)),
            (_ANY, MoeTile(64, 128, 128, 4, 3, tma=False)),
        ),
    ),
    "swiglu_backward_fp8": Family(
        weights=2,
        row_bytes=2,
        weight_bytes=1,
        tiles=(
            (8, MoeTile(16, 64, 128, 4, 4, blocks=2, swap=True)),
            (32, MoeTile(32, 64, 128, 4, 3, blocks=2, swap=True)),
            (_ANY, MoeTile(64, 64, 128, 4, 3, blocks=2)),
            (_ANY, MoeTile(64, 64, 128, 4, 2, tma=False)),
        ),
    ),
    "dx_fp8": Family(
        weights=1,
        row_bytes=2,
        weight_bytes=1,
        tiles=(
            (8, MoeTile(16, 64, 128, 4, 4, blocks=3, swap=True)),
            (32, MoeTile(32, 128, 128, 4, 3, blocks=2, swap=True)),
            (70, MoeTile(64, 128, 128, 8, 3, blocks=2, swap=True)),
            (_ANY, MoeTile(128, 64, 128, 4, 3, blocks=2, swap=True)),
            (_ANY, MoeTile(64, 128, 128, 4, 2, tma=False)),
        ),
    ),
    "gate_up_bf16": Family(
        weights=2,
        row_bytes=2,
        weight_bytes=2,
        tiles=(
            (8, MoeTile(16, 64, 128, 4, 3, blocks=2, swap=True)),
            (70, MoeTile(64, 64, 64, 4, 3, blocks=3)),
            (_ANY, MoeTile(128, 128, 64, 8, 4)),
            (16, MoeTile(16, 64, 64, 4, 3, tma=False)),
            (_ANY, MoeTile(64, 64, 64, 4, 3, tma=False)),
        ),
    ),
    "down_bf16": Family(
        weights=1,
        row_bytes=2,
        weight_bytes=2,
        tiles=(
            (8, MoeTile(16, 64, 128, 4, 4, blocks=2)),
            (70, MoeTile(64, 128, 64, 4, 4, blocks=2)),
            (_ANY, MoeTile(128, 128, 64, 4, 3, blocks=2)),
            (16, MoeTile(16, 64, 64, 4, 3, tma=False)),
            (_ANY, MoeTile(64, 64, 64, 4, 3, tma=False)),
        ),
    ),
    "swiglu_backward_bf16": Family(
        weights=2,
        row_bytes=2,
        weight_bytes=2,
        tiles=(
            (8, MoeTile(16, 64, 64, 4, 4, blocks=2)),
            (150, MoeTile(64, 64, 64, 4, 4, blocks=2)),
            (_ANY, MoeTile(128, 64, 64, 8, 4)),
            (16, MoeTile(16, 64, 64, 4, 3, tma=False)),
            (_ANY, MoeTile(64, 64, 64, 8, 2, tma=False)),
        ),
    ),
    "dx_bf16": Family(
        weights=1,
        row_bytes=2,
        weight_bytes=2,
        tiles=(
            (8, MoeTile(16, 64, 128, 4, 4, blocks=2)),
            (70, MoeTile(64, 128, 64, 4, 4, blocks=2)),
            (_ANY, MoeTile(128, 256, 64, 8, 3)),
            (16, MoeTile(16, 64, 64, 4, 3, tma=False)),
            (_ANY, MoeTile(64, 64, 64, 4, 3, tma=False)),
        ),
    ),
}


def is_valid(family: Family, tile: MoeTile, facts: DeviceFacts, *, tma: bool) -> bool:
    """Whether the device can run the tile; `tma`: whether the operands' layout allows descriptors."""
    if tile.tma and not (tma and facts.has_tma):
        return False
    return family.shared_memory(tile) * tile.blocks <= facts.shared_memory


@functools.lru_cache(maxsize=4096)
def choose(name: str, facts: DeviceFacts, rows: int, experts: int, *, tma: bool) -> MoeTile:
    """The tile for `rows` rows spread over `experts` experts: the first valid one for that many an expert."""
    family = FAMILIES[name]
    valid = [(most, tile) for most, tile in family.tiles if is_valid(family, tile, facts, tma=tma)]
    return next(tile for most, tile in valid if rows <= most * experts or (most, tile) == valid[-1])
