"""The layers as modules: parameters, state-dict keys, and taking over the weights of other modules."""

import logging

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import contracts
from .functional import shared_expert_mlp
from .moe_layer import MegaMoE

_LOG = logging.getLogger("moe_ops")

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ACTIVATIONS = ("act_fn", "act", "activation_fn", "activation")
_LIMITS = ("swiglu_limit", "limit")


class FrozenProjection(nn.Module):
    """Holds one frozen `weight`, [out_features, in_features] bf16. Not callable: the layer above runs it.

    Deliberately no `nn.Linear`: an adapter that wraps Linears finds nothing here to wrap and then be ignored.
    """

    def __init__(self, in_features: int, out_features: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=torch.bfloat16, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"in_features={in_features}, out_features={out_features}, {self.weight.dtype}"


class SharedExpertMLP(nn.Module):
    """Shared-expert SwiGLU MLP with frozen bf16 weights, named as the MLPs of HF transformers name them.

    `gate_proj.weight`, `up_proj.weight`: [I, H]; `down_proj.weight`: [H, I]. They are created frozen, with
    the initialisation of `nn.Linear`; a state dict of three bias-free Linears of these names loads.

    Args:
        hidden_size: H.
        intermediate_size: I.
        swiglu_limit, profile, backend, save: as for `moe_ops.shared_expert_mlp`, which says what is computed.
        device: where to create the weights.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: at the call, as `moe_ops.shared_expert_mlp`;
            so moving the module with `.half()` or `.float()` makes the next call raise.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        swiglu_limit: float | None = None,
        profile: str | None = None,
        backend: str | None = None,
        save: str = "recompute",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        contracts.check_call("SharedExpertMLP", {}, swiglu_limit, profile, backend, save)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.swiglu_limit = swiglu_limit
        self.profile = profile
        self.backend = backend
        self.save = save
        self.gate_proj = FrozenProjection(hidden_size, intermediate_size, device)
        self.up_proj = FrozenProjection(hidden_size, intermediate_size, device)
        self.down_proj = FrozenProjection(intermediate_size, hidden_size, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, as `nn.Linear` does: uniform in +-1 / sqrt(in_features)."""
        for name in _PROJECTIONS:
            weight = self.get_submodule(name).weight
            bound = weight.shape[1] ** -0.5
            with torch.no_grad():
                weight.uniform_(-bound, bound)

    @classmethod
    def from_module(
        cls,
        mlp: nn.Module,
        *,
        swiglu_limit: float | None = None,
        profile: str | None = None,
        backend: str | None = None,
        save: str = "recompute",
    ) -> "SharedExpertMLP":
        """A layer over the very Parameters of `mlp`: bias-free gate_proj, up_proj, down_proj, and SiLU.

        Nothing is copied, and `requires_grad` is left as it is: `moe_ops.freeze` the result before training.
        A limit that the module carries (`swiglu_limit`, `limit`) is taken over.

        Raises:
            TypeError: a projection is missing or is no plain `nn.Linear` (LoRA-wrapped, quantised,
                parametrised), or the activation is missing or is not SiLU.
            ValueError: a bias, hooks or a replaced forward on a projection, or another limit than the
                module's.
        """
        weights = {name: _linear_weight(mlp, name) for name in _PROJECTIONS}
        _require_silu(mlp)
        limit = _limit(mlp, swiglu_limit)
        intermediate, hidden = weights["gate_proj"].shape
        layer = cls(
            hidden,
            intermediate,
            swiglu_limit=limit,
            profile=profile,
            backend=backend,
            save=save,
            device="meta",
        )
        for name, weight in weights.items():
            layer.get_submodule(name).weight = weight
        layer.train(mlp.training)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H] bf16. Returns [..., H] bf16."""
        return shared_expert_mlp(
            x,
            self.gate_proj.weight,
            self.up_proj.weight,
            self.down_proj.weight,
            swiglu_limit=self.swiglu_limit,
            profile=self.profile,
            backend=self.backend,
            save=self.save,
        )

    def extra_repr(self) -> str:
        options = ("swiglu_limit", "profile", "backend")
        text = "".join(
            f", {name}={getattr(self, name)!r}" for name in options if getattr(self, name) is not None
        )
        sizes = f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        return f"{sizes}{text}, save={self.save!r}"


def freeze(module: nn.Module) -> tuple[str, ...]:
    """Freeze the weights of every moe_ops layer in `module`, itself included, and no other parameter.

    Returns:
        The names, within `module`, of the parameters that required grad and no longer do; logged at INFO.

    Raises:
        TypeError: `module` is no `nn.Module`.
        ValueError: it holds no moe_ops layer; freeze a plain module with its own `requires_grad_(False)`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"moe_ops.freeze: module must be a torch.nn.Module; got {type(module).__name__}. "
            "Freeze a tensor with requires_grad_(False)."
        )
    layers = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, SharedExpertMLP | MegaMoE)
    }
    if not layers:
        raise ValueError(
            f"moe_ops.freeze: module must hold a moe_ops layer; got {type(module).__name__} without one. "
            "Freeze a plain module with module.requires_grad_(False)."
        )
    frozen = []
    for prefix, layer in layers.items():
        for name, parameter in layer.named_parameters(prefix):
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                frozen.append(name)
    _LOG.info("froze %d parameters of %d layers: %s", len(frozen), len(layers), ", ".join(frozen) or "none")
    return tuple(frozen)


def _linear_weight(mlp: nn.Module, name: str) -> nn.Parameter:
    where = f"SharedExpertMLP.from_module: {type(mlp).__name__}.{name}"
    linear = getattr(mlp, name, None)
    if type(linear) is not nn.Linear:
        raise TypeError(
            f"{where} must be a plain torch.nn.Linear; got {type(linear).__name__}. "
            "Merge an adapter or dequantise the weight first, or leave this module as it is."
        )
    if linear.bias is not None:
        raise ValueError(f"{where} must have no bias; got one. Leave this module as it is.")
    if linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear):
        raise ValueError(
            f"{where} must have no hooks and its own forward; got some, which would be skipped. Remove them."
        )
    return linear.weight


def _require_silu(mlp: nn.Module) -> None:
    where = f"SharedExpertMLP.from_module: the activation of {type(mlp).__name__}"
    activation = next((getattr(mlp, name) for name in _ACTIVATIONS if hasattr(mlp, name)), None)
    if activation is None:
        raise TypeError(
            f"{where} must be SiLU; got no attribute {', '.join(_ACTIVATIONS)}. "
            "If it is SiLU, set act_fn = torch.nn.SiLU() on the module."
        )
    if not _is_silu(activation):
        name = getattr(activation, "__name__", repr(activation))
        raise TypeError(f"{where} must be SiLU; got {name}. Leave this module as it is.")


def _is_silu(activation: object) -> bool:
    """By what it computes: HF models carry SiLU as a class of their own, a function or a name."""
    if not callable(activation):
        return activation in ("silu", "swish")
    probe = torch.linspace(-8, 8, 65, dtype=torch.float32, device="cpu")
    result = activation(probe)
    return (
        isinstance(result, Tensor) and result.shape == probe.shape and torch.allclose(result, F.silu(probe))
    )


def _limit(mlp: nn.Module, requested: float | None) -> float | None:
    carried = next((getattr(mlp, name) for name in _LIMITS if getattr(mlp, name, None) is not None), None)
    if requested is not None and carried is not None and requested != carried:
        raise ValueError(
            f"SharedExpertMLP.from_module: swiglu_limit must be the module's, {carried}; got {requested}. "
            "Leave it out to take that one."
        )
    return carried if requested is None else requested
