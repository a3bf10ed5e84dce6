"""What a kernel is told of the experts' weights: strides, scales, or a TMA descriptor. No copies."""

from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class ExpertWeight(NamedTuple):
    """weight: [E, rows, columns], any strides; scale: [E, ceil(rows/128), ceil(columns/128)] or `None`."""

    weight: Tensor
    scale: Tensor | None

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    @property
    def rows(self) -> int:
        return self.weight.shape[1]

    @property
    def columns(self) -> int:
        return self.weight.shape[2]

    @property
    def strides(self) -> tuple[int, int, int]:
        """In elements; of dimensions of size 1, where they say nothing, as if contiguous, for descriptors."""
        expert, row, column = self.weight.stride()
        column = 1 if self.columns == 1 else column
        row = self.columns * column if self.rows == 1 else row
        expert = self.rows * row if self.experts == 1 else expert
        return expert, row, column

    @property
    def scale_strides(self) -> tuple[int, int]:
        """Of an expert and of a row of blocks."""
        return (0, 0) if self.scale is None else self.scale.stride()[:2]

    @property
    def has_tma_layout(self) -> bool:
        """Whether a TMA descriptor can address it: contiguous rows, 16-byte aligned."""
        expert, row, column = self.strides
        size = self.weight.element_size()
        aligned = all(value % 16 == 0 for value in (expert * size, row * size, self.weight.data_ptr()))
        return column == 1 and row >= self.columns and expert >= self.rows * row and aligned

    def source(self, block: list[int], tma: bool) -> Tensor | TensorDescriptor:
        """The kernel's argument: the tensor, or a descriptor of one expert's tiles of shape `block`."""
        if not tma:
            return self.weight
        return TensorDescriptor(self.weight, list(self.weight.shape), list(self.strides), [1, *block])
