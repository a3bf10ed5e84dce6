"""The model of `compile_model.py`: a small DeepSeek-V3-style decoder over bytes, its experts from moe_ops."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moe_ops

VOCABULARY = 256  # bytes
HIDDEN, HEADS, DENSE, EXPERT = 256, 4, 512, 128
EXPERTS, TOP_K = 8, 2
CONTEXT = 128


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        half = HIDDEN // HEADS // 2
        angles = torch.arange(CONTEXT)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * self.cos - second * self.sin, first * self.sin + second * self.cos), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class DenseMLP(nn.Module):
    """A plain SwiGLU MLP, as HF transformers write it."""

    def __init__(self, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, intermediate_size, bias=False)
        self.up_proj = nn.Linear(HIDDEN, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Traffic(NamedTuple):
    """In and out of the experts: x, shared, routed [T, HIDDEN] bf16; index, weights [T, TOP_K]."""

    x: Tensor
    index: Tensor
    weights: Tensor
    shared: Tensor
    routed: Tensor


class MoE(nn.Module):
    """A shared expert beside routed ones that a trainable router chooses by its top-k sigmoid scores."""

    def __init__(self, profile: str | None) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.shared = moe_ops.SharedExpertMLP(HIDDEN, EXPERT)
        self.experts = moe_ops.MegaMoE(HIDDEN, EXPERT, EXPERTS, profile=profile)

    def forward(self, x: Tensor) -> tuple[Tensor, Traffic]:
        x_rows = x.flatten(0, -2)
        weights, index = self.router(x_rows).sigmoid().topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        rows = x_rows.bfloat16()
        shared, routed = self.shared(rows), self.experts(rows, index, weights)
        y = shared.float() + routed.float()
        return y.view(x.shape), Traffic(rows, index, weights, shared, routed)


class Block(nn.Module):
    """Attention and an MLP, each after a norm and beside a residual."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.mlp_norm = nn.RMSNorm(HIDDEN)
        self.mlp = mlp

    def forward(self, x: Tensor) -> tuple[Tensor, Traffic | None]:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp(self.mlp_norm(x))
        y, traffic = y if isinstance(self.mlp, MoE) else (y, None)
        return x + y, traffic


class Decoder(nn.Module):
    """Byte tokens [B, CONTEXT] to logits, with the traffic of every MoE block as a second result.

    Embeddings, attention, norms, routers and the head are fp32, for a trainer to update; all MLPs are frozen.

    Args:
        layers: blocks, the first of them dense.
        profile: of the routed experts.
    """

    def __init__(self, layers: int, profile: str | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        mlps = DenseMLP(DENSE).requires_grad_(False), *(MoE(profile) for _ in range(layers - 1))
        self.blocks = nn.ModuleList(map(Block, mlps))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    @property
    def moes(self) -> list[MoE]:
        return [block.mlp for block in self.blocks[1:]]

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Traffic]]:
        x, traffic = self.embedding(tokens), []
        for block in self.blocks:
            x, of_block = block(x)
            if of_block is not None:
                traffic.append(of_block)
        return self.head(self.norm(x)), traffic
