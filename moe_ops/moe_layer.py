"""The MoE layer as a module: packed expert weights, named as HF transformers names fused experts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.hub import tqdm  # the real one, where that is installed

from . import contracts, quant_contracts
from .functional import mega_moe, quantize_weights_block

WEIGHT_FORMATS = ("fp8", "bf16")


class MegaMoE(nn.Module):
    """The routed experts of an MoE block with frozen weights; the router is the caller's.

    `gate_up_proj`: [E, 2I, H], gate rows first; `down_proj`: [E, H, I]; with fp8 weights (float8_e4m3fn) also
    `gate_up_proj_scale_inv`: [E, ceil(2I/128), ceil(H/128)] and `down_proj_scale_inv`: [E, ceil(H/128),
    ceil(I/128)], fp32, value = code * scale. Created frozen, uniform in +-1 / sqrt(fan in). fp8 weights and
    their scales keep their dtypes under `.bfloat16()`, `.half()`, `.to(dtype)`.

    Args:
        hidden_size: H.
        intermediate_size: I.
        num_experts: E.
        swiglu_limit, profile: as for `moe_ops.mega_moe`, which says what is computed.
        weights: "fp8" or "bf16".
        device: where to create the weights.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: at the call, as `moe_ops.mega_moe`; a wrong
            option when it is created.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        swiglu_limit: float | None = None,
        weights: str = "fp8",
        profile: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        contracts.check_call("MegaMoE", {}, swiglu_limit, profile)
        if weights not in WEIGHT_FORMATS:
            required = f"one of {contracts.list_names(WEIGHT_FORMATS)}"
            contracts.fail(ValueError, "MegaMoE", "weights", required, repr(weights), "Correct the name.")
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_experts = num_experts
        self.swiglu_limit = swiglu_limit
        self.weights = weights
        self.profile = profile
        blocks = [-(-size // 128) for size in (hidden_size, intermediate_size, 2 * intermediate_size)]
        blocks_h, blocks_i, blocks_2i = blocks
        dtype = torch.float8_e4m3fn if weights == "fp8" else torch.bfloat16
        self.gate_up_proj = _frozen((num_experts, 2 * intermediate_size, hidden_size), dtype, device)
        self.down_proj = _frozen((num_experts, hidden_size, intermediate_size), dtype, device)
        if weights == "fp8":
            self.gate_up_proj_scale_inv = _frozen((num_experts, blocks_2i, blocks_h), torch.float32, device)
            self.down_proj_scale_inv = _frozen((num_experts, blocks_h, blocks_i), torch.float32, device)
        else:
            self.gate_up_proj_scale_inv = self.down_proj_scale_inv = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, expert by expert: uniform in +-1 / sqrt(fan in), then quantised."""
        if self.gate_up_proj.is_meta:
            return
        for name in ("gate_up_proj", "down_proj"):
            for expert in range(self.num_experts):
                shape = getattr(self, name).shape[1:]
                value = torch.empty(shape, dtype=torch.float32, device=getattr(self, name).device)
                self._set(name, expert, value.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5))

    @classmethod
    def from_bf16(
        cls,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        swiglu_limit: float | None = None,
        profile: str | None = None,
        progress: bool = True,
    ) -> "MegaMoE":
        """A layer of fp8 weights, quantised in blocks of 128 x 128, expert by expert.

        Args:
            gate_up_proj: [E, 2I, H] bf16, fp16 or fp32, gate rows first.
            down_proj: [E, H, I].
            swiglu_limit, profile: as for the layer.
            progress: whether to show a progress bar on stderr (with tqdm, where that is installed).

        Raises:
            TypeError, ValueError: a wrong type, dtype or shape.
        """
        op = "MegaMoE.from_bf16"
        for name, value in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
            quant_contracts.check_quantize(op, name, value, 3)
            if value.dim() != 3:
                got = contracts.shape_text(value)
                contracts.fail(ValueError, op, name, "[E, out, in]", got, "Stack the experts.")
        experts, double, hidden = gate_up_proj.shape
        if double % 2 or tuple(down_proj.shape) != (experts, hidden, double // 2):
            required = f"[E, H, I] = {[experts, hidden, double // 2]}, as gate_up_proj is [E, 2I, H]"
            got = contracts.shape_text(down_proj)
            contracts.fail(
                ValueError, op, "down_proj", required, got, "Weights are [out, in] of each expert."
            )
        layer = cls(
            hidden, double // 2, experts, swiglu_limit=swiglu_limit, profile=profile, device="meta"
        ).to_empty(device=gate_up_proj.device)
        with tqdm(total=experts, desc="Quantising experts", disable=not progress) as bar:
            for expert in range(experts):
                layer._set("gate_up_proj", expert, gate_up_proj[expert].detach())
                layer._set("down_proj", expert, down_proj[expert].detach())
                bar.update(1)
        return layer

    @torch.no_grad()
    def _set(self, name: str, expert: int, value: Tensor) -> None:
        """Store one expert's matrix in the layer's format."""
        if self.weights == "bf16":
            getattr(self, name)[expert].copy_(value)
            return
        codes, scales = quantize_weights_block(value)
        getattr(self, name)[expert].copy_(codes)
        getattr(self, f"{name}_scale_inv")[expert].copy_(scales)

    def forward(
        self,
        hidden_states: Tensor | tuple[Tensor, Tensor],
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        return_expert_counts: bool = False,
        validate_indices: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The weighted sum of each token's experts.

        Args:
            hidden_states: [T, H] bf16, or the pair of `moe_ops.mega_moe`.
            top_k_index: [T, top_k] int32 or int64, -1 for a masked slot.
            top_k_weights: [T, top_k] fp32 or bf16 (widened; its gradient returns in bf16).
            return_expert_counts, validate_indices: as for `moe_ops.mega_moe`.

        Returns:
            [T, H] bf16, or that and the counts [E + 1] int32.
        """
        if isinstance(top_k_weights, Tensor) and top_k_weights.dtype == torch.bfloat16:
            top_k_weights = top_k_weights.float()
        return mega_moe(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.gate_up_proj_scale_inv,
            self.down_proj,
            self.down_proj_scale_inv,
            swiglu_limit=self.swiglu_limit,
            profile=self.profile,
            return_expert_counts=return_expert_counts,
            validate_indices=validate_indices,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MegaMoE":
        """fp8 weights and their scales follow a move to a device, not a cast."""
        if self.weights == "bf16":
            return super()._apply(fn, recurse)

        def move(value: Tensor) -> Tensor:
            probe = fn(value.new_empty(0))
            return fn(value) if probe.dtype == value.dtype else value.to(probe.device)

        return super()._apply(move, recurse)

    def __getstate__(self) -> dict:
        """fp8 weights as bytes: plain pickle has no storage type for them."""
        parameters = {
            name: value.data.view(torch.uint8) if name in self._fp8_names else value
            for name, value in self._parameters.items()
        }
        return self.__dict__ | {"_parameters": parameters}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for name in self._fp8_names:
            value = self._parameters[name].view(torch.float8_e4m3fn)
            self._parameters[name] = nn.Parameter(value, requires_grad=False)

    @property
    def _fp8_names(self) -> tuple[str, ...]:
        return ("gate_up_proj", "down_proj") if self.weights == "fp8" else ()

    def extra_repr(self) -> str:
        sizes = ("hidden_size", "intermediate_size", "num_experts", "weights")
        options = [name for name in ("swiglu_limit", "profile") if getattr(self, name) is not None]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in (*sizes, *options))


def _frozen(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
