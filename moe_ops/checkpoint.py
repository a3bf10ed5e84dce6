"""Selective activation checkpointing around the layers."""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import CheckpointPolicy

from . import moe_operators, ops  # noqa: F401  (register the operators named below)

_FORWARD_OPERATORS = frozenset(
    {
        torch.ops.moe_ops.shared_expert_mlp.default,
        torch.ops.moe_ops._shared_expert_mlp_save.default,
        torch.ops.moe_ops._mega_moe.default,
    }
)


def checkpoint_policy() -> Callable[..., CheckpointPolicy]:
    """A policy that saves the outputs of this package's forward operators and recomputes the rest.

    A checkpointed block then runs each of these operators once. Their own backward already recomputes what it
    needs (`save="recompute"`); without the policy the block's recomputation would run them a second time.

        contexts = functools.partial(create_selective_checkpoint_contexts, moe_ops.checkpoint_policy())
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    Returns:
        A policy function for `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
    """
    return _save_forward_operators


def _save_forward_operators(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _FORWARD_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
