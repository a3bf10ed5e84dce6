"""What differs among the versions of Inductor, in one place."""

from collections.abc import Sequence

from torch._inductor import config, ir
from torch._inductor.select_algorithm import autotune_select_algorithm


def select(
    name: str, choices: Sequence[ir.ChoiceCaller], inputs: Sequence[ir.IRNode], layout: ir.Layout
) -> ir.TensorBox:
    """The output of the only choice; of several, those of `max-autotune`, the fastest one's."""
    if len(choices) == 1:
        return choices[0].output_node()
    result = autotune_select_algorithm(name, list(choices), list(inputs), layout)
    return result[0] if isinstance(result, tuple) else result  # (node, choice) from torch 2.13 on


def tunes() -> bool:
    """Whether the user asked for kernels to be chosen by benchmark."""
    return config.max_autotune or config.max_autotune_gemm
