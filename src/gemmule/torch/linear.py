"""Quantised linear layers of PyTorch: `QuantLinear`, `quantize_`, and the operator below them.

``torch.ops.gemmule.quantized_linear`` takes a quantised matrix as its tensors, so that a whole
model compiles without a graph break. It computes as `gemmule.matvec` and `gemmule.vecmat` do,
on the CPU and on CUDA devices, and is differentiable in x, not in the weights.

>>> import torch, gemmule.torch.linear as gl
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
>>> gl.quantize_(model, bits=8)(torch.ones(2, 64)).shape
torch.Size([2, 8])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch

from gemmule.dispatch.autograd import autocast, wanted
from gemmule.quant import checks, rounding
from gemmule.quant.files import named_dtype
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize
from gemmule.torch.quantized_linear import PARTS, matrix_of, run

Filter = Callable[[str, torch.nn.Linear], bool]


class QuantLinear(torch.nn.Module):  # type: ignore[misc]
    """``x W^T + bias`` with W quantised: what stands in for `torch.nn.Linear`.

    Its buffers are a `QuantizedMatrix`'s parts in layout ``row``: ``codes``, ``scales``, ``zeros``
    (None when symmetric) and ``perm`` (None without one). A state_dict holds them and ``bias``, and
    loads into a layer made with the same options (one with ``perm`` into one that has it).
    ``.half()`` and ``.to(dtype)`` leave the numbers as they are: x decides in which dtype is
    computed. Sums are kept in float32 for halves.

    Make one from a layer (`from_linear`), from a matrix (`from_matrix`), or empty, to load into.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    perm: torch.Tensor | None
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bits: int = 4,
        group_size: int | None = 64,
        symmetric: bool = False,
        scale_dtype: str = "float32",
    ) -> None:
        super().__init__()
        out_features, in_features = shape = checks.shape((out_features, in_features))
        bits, group_size = checks.bits(bits), checks.group_size(group_size)
        codes = np.zeros((out_features, -(-in_features * bits // 8)), np.uint8)
        groups = rounding.group_count(in_features, group_size)
        scales = np.ones((1, 1) if group_size is None else (out_features, groups))
        zeros = None if symmetric else np.zeros(scales.shape, np.float32)
        scales = scales.astype(named_dtype(scale_dtype))
        self._hold(
            QuantizedMatrix.from_parts(
                codes, scales, zeros, shape=shape, bits=bits, group_size=group_size
            )
        )
        self.bias = torch.nn.Parameter(torch.zeros(out_features)) if bias else None

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, **options: Any) -> Self:
        """Return a layer's quantised form, on its device; options as `gemmule.quantize` has them.

        The bias is shared with the layer, not copied. TypeError for what is no `torch.nn.Linear`.

        >>> import torch, gemmule.torch.linear as gl
        >>> gl.QuantLinear.from_linear(torch.nn.Linear(64, 32), bits=4, group_size=32)
        QuantLinear(in_features=64, out_features=32, bits=4, group_size=32, bias=True)
        """
        if not isinstance(linear, torch.nn.Linear):  # others may hold their weight turned
            raise TypeError(f"{type(linear).__name__} is no torch.nn.Linear; use from_matrix")
        made = cls.from_matrix(quantize(linear.weight, **options), linear.bias)
        made.train(linear.training)
        return made

    @classmethod
    def from_matrix(cls, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> Self:
        """Return a layer of an existing matrix ``W (out, in)``, such as one of another tool's file.

        ValueError for a transposed matrix, or a bias that is not ``(out,)``.
        """
        if matrix.transposed:
            raise ValueError("the matrix is transposed: give the one that is W (out, in) itself")
        if bias is not None and tuple(bias.shape) != matrix.shape[:1]:
            raise ValueError(f"bias has shape {tuple(bias.shape)}, but must be {matrix.shape[:1]}")
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer._hold(matrix.to(layout="row"))
        held = bias is None or isinstance(bias, torch.nn.Parameter)
        layer.bias = bias if held else torch.nn.Parameter(bias)
        return layer

    def _hold(self, matrix: QuantizedMatrix) -> None:
        self.out_features, self.in_features = matrix.stored_shape
        self.bits, self.group_size = matrix.bits, matrix.group_size
        for part in PARTS:
            self.register_buffer(part, _tensor(getattr(matrix, part)))

    @property
    def matrix(self) -> QuantizedMatrix:
        """The weights as a QuantizedMatrix: on the host in this layer's memory, on a GPU a copy."""
        parts = (self.codes, self.scales, self.zeros, self.perm)
        return matrix_of(parts, self._shape, self.bits, self.group_size)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x W^T + bias`` in x's dtype, under autocast in its; x (..., in_features)."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}; a QuantLinear takes a torch.Tensor.")
        # Where PyTorch need not know of the product, its dispatcher is spared: 13 of 37 us.
        known, bias = wanted(x, None), self.bias
        operator: Any = torch.ops.gemmule.quantized_linear.default if known else run
        parts = (self.codes, self.scales, self.zeros, self.perm)
        form = (*self._shape, self.bits, self.group_size, False)
        if known:
            (x,) = autocast(x)
        # A bias that alone wants a gradient is added apart: the product itself stays as quick.
        if bias is None or known or not (bias.requires_grad and torch.is_grad_enabled()):
            return operator(x, *parts, *form, bias)
        return operator(x, *parts, *form) + bias.to(x.dtype)

    def extra_repr(self) -> str:
        """Return what stands between the brackets of the layer's repr."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, bias={self.bias is not None}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Seen as integers, scales and zero points follow to a device but not to another dtype.
        dtypes = {}
        for part in ("scales", "zeros"):
            tensor = getattr(self, part)
            if tensor is not None:
                dtypes[part] = tensor.dtype
                setattr(self, part, tensor.view(getattr(torch, f"int{8 * tensor.itemsize}")))
        super()._apply(fn, recurse)
        for part, dtype in dtypes.items():
            setattr(self, part, getattr(self, part).view(dtype))
        return self


def quantize_(
    model: torch.nn.Module,
    bits: int = 4,
    group_size: int | None = 64,
    *,
    filter: Filter | None = None,  # noqa: A002  the name that users of such functions look for
    **options: Any,
) -> torch.nn.Module:
    """Replace the linear layers of a model by quantised ones, in place; return the model.

    filter: called with a layer's full name and the `torch.nn.Linear`; True where it is replaced
    (default: all; subclasses of Linear stay). options: those of `gemmule.quantize`, such as
    ``method``, ``symmetric``, ``scale_dtype``. A layer that stands in several places stays one.
    Weights that are shared with something else, such as an embedding, are not shared any more.

    ValueError where the model is itself a linear layer: use `QuantLinear.from_linear`. Errors of
    `gemmule.quantize` name the layer; those before it are replaced then.

    >>> import torch, gemmule.torch.linear as gl
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
    >>> gl.quantize_(model, filter=lambda name, layer: layer.out_features > 2)
    Sequential(
      (0): QuantLinear(in_features=64, out_features=64, bits=4, group_size=64, bias=True)
      (1): Linear(in_features=64, out_features=2, bias=True)
    )
    """
    if type(model) is torch.nn.Linear:
        raise ValueError("the model is one linear layer: use QuantLinear.from_linear")
    made: dict[torch.nn.Module, QuantLinear] = {}
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            full = f"{path}.{name}" if path else name
            if type(child) is not torch.nn.Linear or not (filter is None or filter(full, child)):
                continue
            if child not in made:
                try:
                    made[child] = QuantLinear.from_linear(
                        child, bits=bits, group_size=group_size, **options
                    )
                except (TypeError, ValueError) as error:
                    raise type(error)(f"layer {full!r}: {error}") from error
            setattr(parent, name, made[child])
            if isinstance(parent, torch.nn.TransformerEncoderLayer):
                parent.activation_relu_or_gelu = 0  # else a kernel of its own wants float weights
    return model


def _tensor(part: Any) -> torch.Tensor | None:
    """Return a part of a matrix as a tensor: of NumPy's a copy, of a device's the same memory."""
    if part is None:
        return None
    if not isinstance(part, np.ndarray):
        return torch.from_dlpack(part)
    if part.dtype.name == "bfloat16":
        return torch.from_numpy(part.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(part.copy())
