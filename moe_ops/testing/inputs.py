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
