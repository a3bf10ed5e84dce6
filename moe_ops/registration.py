"""The operator library and what every registration has in common."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import plugin

LIBRARY = torch.library.Library("moe_ops", "DEF")


def register(schema: str, implementation: Callable, fake: Callable, vmap: Callable) -> Callable:
    """Define an operator with one implementation for every device, its fake and its vmap rule; returns it."""

    def fake_of_a_plugin(*args, **options):
        plugin.install()
        return fake(*args, **options)

    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_ops::{name}", fake_of_a_plugin, lib=LIBRARY)
    torch.library.register_vmap(f"moe_ops::{name}", vmap, lib=LIBRARY)
    return getattr(torch.ops.moe_ops, name).default


def register_autocast(op: Callable, make_kernel: Callable[[str], Callable]) -> None:
    """`make_kernel(device_type)` returns what runs at the Autocast key; it calls `below_autocast`."""
    name = op._schema.name.removeprefix("moe_ops::")
    LIBRARY.impl(name, make_kernel("cpu"), "AutocastCPU")
    LIBRARY.impl(name, make_kernel("cuda"), "AutocastCUDA")


def below_autocast(device_type: str, op: Callable, *args, **options):
    """Call `op` past its Autocast kernel."""
    key = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}[device_type]
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return op(*args, **options)


def below_autograd(op: Callable, *args, **options):
    """Call `op` past its Autograd kernel."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **options)


def transform_of(*tensors: Tensor) -> str | None:
    """The differentiating transform that one of the tensors is under, by name, if any."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        return "forward-mode automatic differentiation"
    if not (torch.is_grad_enabled() and torch._C._are_functorch_transforms_active()):
        return None
    if any(tensor.requires_grad for tensor in tensors):
        return "torch.func.grad (or another torch.func transform)"
    return None
