"""What differs among the versions of Inductor, in one place."""

from collections.abc import Sequence

from torch._inductor import config, ir
from torch._inductor.select_algorithm import (
    TritonTemplate,
    TritonTemplateKernel,
    autotune_select_algorithm,
)


class _Kernel(TritonTemplateKernel):
    """With `output_pointer()` in its template, for an output that nothing is fused into."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._register_extra_template_env_fns(self.output_pointer)

    def output_pointer(self) -> str:
        return self.args.output(self.output_node.get_name())


class Template(TritonTemplate):
    kernel_type = _Kernel


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
