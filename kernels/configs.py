from dataclasses import dataclass
import triton
from .launch import DeviceFacts

@dataclass(frozen=True)
class Tile:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    tma: bool = True
    blocks_per_multiprocessor: int = 1

    @property
    def options(self):
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP_M": self.group_m, "TMA": self.tma, "num_warps": self.num_warps, "num_stages": self.num_stages}

    def grid(self, facts: DeviceFacts, rows, columns):
        tiles = triton.cdiv(rows, self.block_m) * triton.cdiv(columns, self.block_n)
        return (min(tiles, facts.multiprocessors * self.blocks_per_multiprocessor),)

FORCED = None
def choose(family, facts, tokens, columns, *, strict, tma):
    t = FORCED
    if not tma:
        from dataclasses import replace
        t = replace(t, tma=False)
    return t
