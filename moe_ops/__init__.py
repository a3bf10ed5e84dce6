"""Batch-invariant MoE layers with frozen weights, for eager PyTorch and torch.compile.

Importing registers the operators under `torch.ops.moe_ops`. It imports neither Triton nor Inductor.
"""

from pathlib import Path as _Path

__version__ = "0.1.0"

_root = _Path(__file__).resolve().parent
if not (_root / "kernels").is_dir() and (_root.parent / "pyproject.toml").is_file():
    # A source checkout: kernels/ and lowering/ lie beside this package instead of inside it.
    __path__.append(str(_root.parent))

from . import autograd as _autograd  # noqa: E402, F401  (registers the gradients)
from . import testing  # noqa: E402
from .checkpoint import checkpoint_policy  # noqa: E402
from .environment import Provenance, provenance  # noqa: E402
from .functional import shared_expert_mlp  # noqa: E402
from .layers import SharedExpertMLP, freeze  # noqa: E402
from .numerics import profiles  # noqa: E402
from .reference import shared_expert_mlp_dx_reference, shared_expert_mlp_reference  # noqa: E402

__all__ = [
    "Provenance",
    "SharedExpertMLP",
    "checkpoint_policy",
    "freeze",
    "profiles",
    "provenance",
    "shared_expert_mlp",
    "shared_expert_mlp_dx_reference",
    "shared_expert_mlp_reference",
    "testing",
]
