"""Fresh inputs for tests and benchmarks."""

from typing import NamedTuple

import torch
from torch import Tensor


class SharedExpertInputs(NamedTuple):
    """x, dy: [T, H]; w_gate, w_up: [I, H]; w_down: [H, I]; all bf16."""

    x: Tensor
    dy: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """(w_gate, w_up, w_down)."""
        return self.w_gate, self.w_up, self.w_down


def shared_expert_inputs(
    tokens: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> SharedExpertInputs:
    """Normal activations and weights scaled by fan-in, so that g, u and y are of order one.

    Drawn on the CPU, so that every device gets the same values for one seed.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        value = torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu") * scale
        return value.to(device, torch.bfloat16)

    return SharedExpertInputs(
        x=normal(tokens, hidden_size, 1.0),
        dy=normal(tokens, hidden_size, 1.0),
        w_gate=normal(intermediate_size, hidden_size, hidden_size**-0.5),
        w_up=normal(intermediate_size, hidden_size, hidden_size**-0.5),
        w_down=normal(hidden_size, intermediate_size, intermediate_size**-0.5),
    )


class MegaMoEInputs(NamedTuple):
    """Arguments of the MoE layer.

    x, dy: [T, H] bf16; topk_idx: [T, top_k] int64; topk_weights: [T, top_k] fp32; w_gate_up [E, 2I, H] and
    w_down [E, H, I], e4m3 with their 128 x 128 block scales in fp32, or bf16 with `None`.
    """

    x: Tensor
    dy: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_gate_up_scale: Tensor | None
    w_down: Tensor
    w_down_scale: Tensor | None

    @property
    def weights(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """(w_gate_up, w_gate_up_scale, w_down, w_down_scale)."""
        return self.w_gate_up, self.w_gate_up_scale, self.w_down, self.w_down_scale

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        """The positional arguments of `moe_ops.mega_moe`."""
        return self.x, self.topk_idx, self.topk_weights, *self.weights


def mega_moe_inputs(
    tokens: int,
    hidden_size: int,
    intermediate_size: int,
    experts: int,
    top_k: int,
    *,
    weights: str = "fp8",
    masked: float = 0.0,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> MegaMoEInputs:
    """Normal activations and weights scaled by fan-in, a top-k of random scores, softmax routing weights.

    Activations and routing are drawn on the CPU and do not depend on `device`; weights are drawn there.

    Args:
        weights: "fp8" (quantised, expert by expert) or "bf16".
        masked: the share of slots that are -1; their routing weights are NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    weight_generator = torch.Generator(device).manual_seed(seed + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    def packed(rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
        dtype = torch.float8_e4m3fn if weights == "fp8" else torch.bfloat16
        codes = torch.empty(experts, rows, columns, dtype=dtype, device=device)
        scales = None
        if weights == "fp8":
            blocks = -(-rows // 128), -(-columns // 128)
            scales = torch.empty(experts, *blocks, dtype=torch.float32, device=device)
        for expert in range(experts):
            value = torch.randn(rows, columns, generator=weight_generator, dtype=torch.float32, device=device)
            value *= columns**-0.5
            if scales is None:
                codes[expert] = value
            else:
                code, scales[expert] = torch.ops.moe_ops.quantize_weights_block(value)
                codes[expert].copy_(code)
        return codes, scales

    scores = normal(tokens, experts)
    values, index = scores.topk(min(top_k, experts), -1)
    if top_k > experts:  # experts repeat
        index = torch.randint(experts, (tokens, top_k), generator=generator)
        values = scores.gather(1, index)
    routing = values.softmax(-1)
    hidden = torch.rand(tokens, top_k, generator=generator) < masked
    index, routing = index.masked_fill(hidden, -1), routing.masked_fill(hidden, torch.nan)
    x, dy = (normal(tokens, hidden_size).to(device, torch.bfloat16) for _ in range(2))
    gate_up, down = packed(2 * intermediate_size, hidden_size), packed(hidden_size, intermediate_size)
    return MegaMoEInputs(x, dy, index.to(device), routing.to(device), *gate_up, *down)
