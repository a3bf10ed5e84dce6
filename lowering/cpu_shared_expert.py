"""The shared expert of `cpu-fp32-v1` in C++: the profile's chains of FMAs themselves, without a BLAS library.

Nothing is fused into these kernels; each stores its result rounded, and what follows reads it from memory.
"""

import torch
from torch._inductor import config, ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.select_algorithm import realize_inputs
from torch._inductor.utils import parallel_num_threads
from torch._inductor.virtualized import V

from ..kernels.cpu_matmul import CHUNK_K
from .shells import shell

_VECTOR_BITS = {"AVX2": 256, "AVX512": 512}


def reason() -> str | None:
    """Why these kernels would not have the profile's bits, if they would not."""
    capability = torch.backends.cpu.get_cpu_capability()
    if pick_vec_isa().bit_width() != _VECTOR_BITS.get(capability):
        return f"Inductor does not compile for the vectors of ATen here ({capability})"
    if config.cpp.enable_floating_point_contract_flag != "off" or config.cpp.enable_unsafe_math_opt_flag:
        return "Inductor is told to compile C++ with contraction or unsafe mathematics"
    return None


class _Kernel(CppTemplate):
    """A C++ kernel: a shell of `templates/`, its inputs by name, and what it is told."""

    def __init__(self, name, inputs, size, dtype, **options):
        self.inputs = {key: realize_inputs(value) for key, value in inputs.items()}
        for value in self.inputs.values():
            value.freeze_layout()
        self.options = options
        layout = ir.FixedLayout(torch.device("cpu"), dtype, list(size))
        super().__init__(name, list(self.inputs.values()), layout, parallel_num_threads())

    def render(self, kernel, template_buffer_node=None, **_):
        template = self._template_from_string(shell(self.name))
        output = self.output_node if template_buffer_node is None else template_buffer_node
        return template.render(kernel=kernel, template=self, inputs=self.inputs, Y=output, **self.options)

    def has_contiguous_rows(self, value):
        return V.graph.sizevars.statically_known_equals(value.get_stride()[1], 1)

    def output(self):
        """The kernel's result, with nothing fused into it."""
        result = self.generate().output_node()
        V.graph.no_fuse_buffer_names.add(result.get_name())
        return result


def forward(x, w_gate, w_up, w_down, limit, *, save):
    """(y, g, u): [T, H] bf16 and, with `save`, the pre-activations [T, I] fp32, else `None`.

    Args:
        x: [T, H]. w_gate, w_up: [I, H]. w_down: [H, I]. All bf16 `TensorBox`es, any strides.
        limit: `swiglu_limit`.
        save: whether to return g and u.
    """
    g, u = (_product(x, [weight], torch.float32, weight_nk=True) for weight in (w_gate, w_up))
    h = _swiglu(g, u, None, limit)
    y = _product(h, [w_down], torch.bfloat16, weight_nk=True)
    return (y, g, u) if save else (y, None, None)


def dx(dy, x, saved, w_gate, w_up, w_down, limit, out_dtype):
    """The gradient of x, [T, H] in `out_dtype`, fp32 or bf16.

    Args:
        dy: [T, H] bf16.
        x: as for the forward, to compute g and u again, or `None`.
        saved: (g, u), [T, I] fp32, where x is `None`.
        w_gate, w_up, w_down, limit: as for the forward.
    """
    if saved is None:
        g, u = (_product(x, [weight], torch.float32, weight_nk=True) for weight in (w_gate, w_up))
    else:
        g, u = saved
    dh = _product(dy, [w_down], torch.bfloat16, weight_nk=False)
    dz = _swiglu(g, u, dh, limit)
    return _product(dz, [w_gate, w_up], out_dtype, weight_nk=False)


def _product(a, weights, dtype, *, weight_nk):
    """a @ weight.T (`weight_nk`), or a @ weights, one above the other; rounded to `dtype`."""
    columns = weights[0].get_size()[0 if weight_nk else 1]
    inputs = {"A": a} | {f"W{index}": weight for index, weight in enumerate(weights)}
    size = (a.get_size()[0], columns)
    return _Kernel("cpu_product", inputs, size, dtype, WEIGHT_NK=weight_nk, CHUNK=CHUNK_K).output()


def _swiglu(g, u, dh, limit):
    """h [T, I], or with `dh` [dgate | dup], [T, 2I]; bf16."""
    rows, columns = g.get_size()
    inputs = {"G": g, "U": u} if dh is None else {"G": g, "U": u, "DH": dh}
    size = (rows, columns if dh is None else 2 * columns)
    limit = None if limit is None else f"{float(limit)!r}"
    return _Kernel("cpu_swiglu", inputs, size, torch.bfloat16, LIMIT=limit).output()
