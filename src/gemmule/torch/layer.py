"""`QuantLinear`: what stands in for `torch.nn.Linear` where weights are codes."""

from __future__ import annotations

from typing import Any, NoReturn, Self

import torch

from gemmule.dispatch.tracked import dispatches, handled, recorded
from gemmule.frameworks.autograd import autocast
from gemmule.quant import checks, float4, rounding
from gemmule.quant.cuda.fragment_order import LAYOUT
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize
from gemmule.torch.coded import Coded
from gemmule.torch.floats import Floats, is_linear, weight_of
from gemmule.torch.parts import PARTS, Shape, matrix_of, placed, tensor_of
from gemmule.torch.quantized_linear import again, check, differentiable, product_of
from gemmule.torch.spread import SPREAD, refuse_spread

_NO_WEIGHT = "a QuantLinear has no weight to set; its codes are set by load_state_dict"
_is_compiling = torch.compiler.is_compiling


class QuantLinear(Coded, torch.nn.Linear):  # type: ignore[misc]
    """``x W^T + bias`` with W quantised: what stands in for `torch.nn.Linear`.

    Its buffers are a `QuantizedMatrix`'s parts: ``codes``, ``scales``, ``zeros`` (None when
    symmetric) and ``perm`` (None without one), on the host in layout ``row``, on a GPU in the
    order that products read there, so that codes are in memory once. A state_dict holds copies in
    layout ``row``, and ``bias``, and loads into a layer made with the same options, wherever it
    lies (one with ``perm`` into one that has it). Another
    ``bits`` or ``group_size`` is an error where shapes tell, or the metadata of a state_dict, which
    `torch.save` keeps and safetensors does not. ``.half()``, ``.to(dtype)`` and ``.type(dtype)``
    leave the numbers as they are: x decides in which dtype is computed. Sums are kept in float32
    for halves. ``weight`` has a weight's shape, device and dtype (the float layer's, which
    ``.to(dtype)`` changes), for models that ask; its numbers are dequantised where they are read,
    and are not to be written to.

    Make one from a layer (`from_linear`), from a matrix (`from_matrix`), or empty, to load into.
    """

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
        format: str | None = None,  # noqa: A002  as `gemmule.quantize` has it
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        if format is not None:
            checks.one_of("format", format, float4.GROUP_SIZES)
            bits, group_size = float4.BITS, float4.GROUP_SIZES[format]
        else:
            checks.one_of("scale_dtype", scale_dtype, checks.SCALE_DTYPES)
        shape = checks.shape((out_features, in_features))
        self.out_features, self.in_features = m, n = shape
        self.bits, self.group_size = checks.bits(bits), checks.group_size(group_size)
        groups = (1, 1) if group_size is None else (m, rounding.group_count(n, group_size))
        codes = torch.zeros((m, -(-n * bits // 8)), dtype=torch.uint8, device=device)
        of_scales = scale_dtype if format is None else float4.SCALE_DTYPES[format]
        scales = torch.ones(groups, dtype=getattr(torch, of_scales), device=device)
        zeros = None if symmetric else torch.zeros(groups, device=device, dtype=torch.float32)
        if format is not None:
            zeros = torch.ones((m, 1), device=device) if format == "nvfp4" else None
        self._register(codes, scales, zeros, None)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(m, device=device, dtype=dtype))
        self.weight_dtype = dtype or torch.get_default_dtype()

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, **options: Any) -> Self:
        """Return a layer's quantised form, on its device; options as `gemmule.quantize` has them.

        linear: a `torch.nn.Linear` or a ``Conv1D`` of transformers. The bias is shared with it, not
        copied. TypeError for anything else.

        >>> import torch, gemmule.torch.linear as gl
        >>> gl.QuantLinear.from_linear(torch.nn.Linear(64, 32), bits=4, group_size=32)
        QuantLinear(in_features=64, out_features=32, bits=4, group_size=32, bias=True)
        """
        if isinstance(linear, cls) or not (
            isinstance(linear, torch.nn.Linear) or is_linear(linear)
        ):
            raise TypeError(f"{type(linear).__name__} is no torch.nn.Linear; use from_matrix")
        made = cls.from_matrix(quantize(weight_of(linear), **options), linear.bias)
        made.weight_dtype = linear.weight.dtype
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
        layer.out_features, layer.in_features = matrix.stored_shape
        layer.bits, layer.group_size = matrix.bits, matrix.group_size
        order = LAYOUT if matrix.device != "cpu" else "row"
        layer._register(*(tensor_of(getattr(matrix.to(layout=order), part)) for part in PARTS))
        held = bias is None or isinstance(bias, torch.nn.Parameter)
        layer.bias = bias if held else torch.nn.Parameter(bias)
        layer.weight_dtype = torch.float32 if layer.bias is None else layer.bias.dtype
        return layer

    @classmethod
    def from_tensors(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        perm: torch.Tensor | None = None,
        *,
        shape: tuple[int, int],
        bits: int,
        group_size: int | None,
    ) -> Self:
        """Return a layer that holds the parts of a matrix, checked: on the host none is copied.

        shape: (out, in). On a GPU they are put in the order that is read there. TypeError and
        ValueError as `QuantizedMatrix.from_parts` has them.
        """
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer.out_features, layer.in_features = shape
        layer.bits, layer.group_size = bits, group_size
        layer._register(*placed((codes, scales, zeros, perm), layer._shape))
        layer.matrix  # noqa: B018  what is wrong is said now
        return layer

    def _register(self, *parts: torch.Tensor | None) -> None:
        super()._register(*parts)
        self.register_parameter("bias", None)

    @property
    def _shape(self) -> Shape:
        return Shape(self.out_features, self.in_features, self.bits, self.group_size)

    @property
    def weight(self) -> torch.Tensor:
        """What stands for the weight (out, in): its form now, its numbers when they are read."""
        return Floats(self)

    def dequantize(self) -> torch.Tensor:
        """Return the weight (out, in) as floats of ``weight_dtype``, a fresh tensor."""
        dtype = str(self.weight_dtype).removeprefix("torch.")
        found = tensor_of(self.matrix.dequantize(dtype))
        assert found is not None  # noqa: S101  a matrix has floats
        return found

    def reset_parameters(self) -> NoReturn:
        """Refuse: there are no parameters to draw."""
        raise TypeError(
            "the weights of a QuantLinear are codes, for which no random ones are drawn"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x W^T + bias`` in x's dtype, under autocast in its; x (..., in_features)."""
        if not _is_compiling():
            y = again(self._buffers, self._parameters["bias"], x)
            if y is not None:
                return y
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}; a QuantLinear takes a torch.Tensor.")
        # What PyTorch handles in other ways goes by its dispatcher, which takes longer than this.
        known = handled() or x.is_meta or dispatches(type(x))
        bias, shape, grad = self.bias, self._shape, torch.is_grad_enabled()
        if not (_is_compiling() or recorded()):
            self._hold(placed(self._parts, shape))
        parts = (self.codes, self.scales, self.zeros, self.perm)
        if known:
            refuse_spread(x, *parts)
            (x,) = autocast(x)
            return torch.ops.gemmule.quantized_linear.default(x, *parts, *shape, False, bias)
        if grad and x.requires_grad:
            return differentiable(x, *parts, *shape, False, bias)
        # A bias that alone wants a gradient is added apart: the product itself stays as quick.
        apart = grad and bias is not None and bias.requires_grad
        added = None if apart else bias
        check(x, added, self.out_features)
        plain = x if type(x) is torch.Tensor else x.detach()
        y = product_of(matrix_of(parts, shape), plain, added, asks=True)
        return y + bias.to(x.dtype) if apart and bias is not None else y

    def extra_repr(self) -> str:
        """Return what stands between the brackets of the layer's repr."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {self._codes}, "
            f"bias={self.bias is not None}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # set to tie it, it would be there and take no part
            raise AttributeError(_NO_WEIGHT)
        if name == "_distribute_module_applied":  # set by PyTorch when it has spread a layer
            raise TypeError(SPREAD)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter; TypeError for a weight, as RowwiseParallel would register."""
        if name == "weight":
            raise TypeError(SPREAD if hasattr(param, "device_mesh") else _NO_WEIGHT)
        super().register_parameter(name, param)

    @classmethod
    def _tied(cls, other: QuantLinear, linear: torch.nn.Linear) -> Self:
        """Return the form of a layer whose weight is that of another, in the other's memory."""
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        for name in ("out_features", "in_features", "bits", "group_size", "weight_dtype"):
            setattr(layer, name, getattr(other, name))
        for part in PARTS:
            layer.register_buffer(part, getattr(other, part))
        layer.register_parameter("bias", linear.bias)
        layer.train(linear.training)
        return layer
