"""Batch-invariant MoE layers with frozen weights, for eager PyTorch and torch.compile.

Importing registers the operators under `torch.ops.moe_ops`. It imports neither Triton nor Inductor.
"""

from pathlib import Path as _Path

__version__ = "0.1.0"

_root = _Path(__file__).resolve().parent
if not (_root / "kernels").is_dir() and (_root.parent / "pyproject.toml").is_file():
    # A source checkout: kernels/ and lowering/ lie beside this package instead of inside it.
    __path__.append(str(_root.parent))

from . import plugin as _plugin  # noqa: E402

_plugin.tag_caches()

from . import autograd as _autograd  # noqa: E402, F401  (registers the gradients)
from . import moe_autograd as _moe_autograd  # noqa: E402, F401
from . import testing  # noqa: E402
from .checkpoint import checkpoint_policy  # noqa: E402
from .environment import Provenance, provenance  # noqa: E402
from .functional import (  # noqa: E402
    dequantize_activations,
    dequantize_weights_block,
    mega_moe,
    quantize_activations,
    quantize_weights_block,
    shared_expert_mlp,
)
from .layers import SharedExpertMLP, freeze  # noqa: E402
from .moe_layer import MegaMoE  # noqa: E402
from .moe_oracle import mega_moe_dx_dweights_reference, mega_moe_reference  # noqa: E402
from .numerics import profiles  # noqa: E402
from .plugin import use_lowerings  # noqa: E402
from .reference import shared_expert_mlp_dx_reference, shared_expert_mlp_reference  # noqa: E402

__all__ = [
    "MegaMoE",
    "Provenance",
    "SharedExpertMLP",
    "checkpoint_policy",
    "dequantize_activations",
    "dequantize_weights_block",
    "freeze",
    "mega_moe",
    "mega_moe_dx_dweights_reference",
    "mega_moe_reference",
    "profiles",
    "provenance",
    "quantize_activations",
    "quantize_weights_block",
    "shared_expert_mlp",
    "shared_expert_mlp_dx_reference",
    "shared_expert_mlp_reference",
    "testing",
    "use_lowerings",
]
