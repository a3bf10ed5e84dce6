"""What a kernel is told of a tensor: its strides, or a TMA descriptor. Nothing is ever copied."""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Operand(NamedTuple):
    """A matrix of any strides.

    Attributes:
        tensor: what holds the elements.
        rows, columns: the matrix's shape.
        row_stride, column_stride: in elements.
        row_offsets: [rows] int64, the elements' offsets of each row where no single stride gives them.
        exponent_range: [2, length] int32 of `operand_range`, for the strict kernels.
    """

    tensor: Tensor
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    row_offsets: Tensor | None = None
    exponent_range: Tensor | None = None

    @property
    def has_tma_layout(self) -> bool:
        """Whether a TMA descriptor can address it: rows of contiguous elements, 16-byte aligned."""
        element_size = self.tensor.element_size()
        return (
            self.row_offsets is None
            and self.column_stride == 1
            and self.row_stride >= self.columns
            and self.row_stride * element_size % 16 == 0
            and self.tensor.data_ptr() % 16 == 0
        )

    def source(self, block: list[int], tma: bool) -> Tensor | TensorDescriptor:
        """The kernel's argument: the tensor, or a descriptor of tiles of shape `block`."""
        if not tma:
            return self.tensor
        return TensorDescriptor(self.tensor, [self.rows, self.columns], [self.row_stride, 1], block)


def matrix(tensor: Tensor) -> Operand:
    """The operand of a two-dimensional tensor."""
    rows, columns = tensor.shape
    return Operand(tensor, rows, columns, *_strides(rows, columns, *tensor.stride()))


def activation(tensor: Tensor) -> Operand:
    """The operand of [..., K]: one row per leading index, in row-major order of the leading dimensions."""
    columns = tensor.shape[-1]
    rows = tensor.shape[:-1].numel()
    try:
        view = tensor.view(rows, columns)
    except RuntimeError:  # the leading dimensions do not lie on one stride
        return Operand(tensor, rows, columns, 0, tensor.stride(-1), _row_offsets(tensor))
    return matrix(view)


def _strides(rows: int, columns: int, row_stride: int, column_stride: int) -> tuple[int, int]:
    """Strides of dimensions of size 1 say nothing; as those of a contiguous matrix they fit a descriptor."""
    column_stride = 1 if columns == 1 else column_stride
    row_stride = columns * column_stride if rows == 1 else row_stride
    return row_stride, column_stride


def _row_offsets(tensor: Tensor) -> Tensor:
    index = torch.arange(tensor.shape[:-1].numel(), device=tensor.device)
    offsets = torch.zeros_like(index)
    for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        offsets += index % size * stride
        index = index // size
    return offsets
