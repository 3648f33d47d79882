"""`QuantLinear`: what stands in for `torch.nn.Linear` where weights are codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import numpy as np
import torch

from gemmule.dispatch.tracked import wanted
from gemmule.frameworks.autograd import autocast
from gemmule.quant import checks, rounding
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize
from gemmule.torch.floats import Floats, is_linear, weight_of
from gemmule.torch.quantized_linear import PARTS, matrix_of, run
from gemmule.torch.replacing import moved
from gemmule.torch.saving import refuse_while_saving


class QuantLinear(torch.nn.Linear):  # type: ignore[misc]
    """``x W^T + bias`` with W quantised: what stands in for `torch.nn.Linear`.

    Its buffers are a `QuantizedMatrix`'s parts in layout ``row``: ``codes``, ``scales``, ``zeros``
    (None when symmetric) and ``perm`` (None without one). A state_dict holds them and ``bias``, and
    loads into a layer made with the same options (one with ``perm`` into one that has it). Another
    ``bits`` or ``group_size`` is an error where shapes tell, or the metadata of a state_dict, which
    `torch.save` keeps and safetensors does not. ``.half()``, ``.to(dtype)`` and ``.type(dtype)``
    leave the numbers as they are: x decides in which dtype is computed. Sums are kept in float32
    for halves. ``weight`` has a weight's shape, device and dtype (the float layer's, which
    ``.to(dtype)`` changes), for models that ask; its numbers are dequantised where they are read,
    and are not to be written to.

    Make one from a layer (`from_linear`), from a matrix (`from_matrix`), or empty, to load into.
    """

    bits: int
    group_size: int | None
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    perm: torch.Tensor | None
    bias: torch.nn.Parameter | None
    weight_dtype: torch.dtype = torch.float32

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
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        shape = checks.shape((out_features, in_features))
        self.out_features, self.in_features = m, n = shape
        self.bits, self.group_size = checks.bits(bits), checks.group_size(group_size)
        checks.one_of("scale_dtype", scale_dtype, checks.SCALE_DTYPES)
        groups = (1, 1) if group_size is None else (m, rounding.group_count(n, group_size))
        codes = torch.zeros((m, -(-n * bits // 8)), dtype=torch.uint8, device=device)
        scales = torch.ones(groups, dtype=getattr(torch, scale_dtype), device=device)
        zeros = None if symmetric else torch.zeros(groups, device=device, dtype=torch.float32)
        self._register(codes, scales, zeros, None)
        self.bias = None
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
        rows = matrix.to(layout="row")
        layer._register(*(_tensor(getattr(rows, part)) for part in PARTS))
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
        """Return a layer that holds the parts of a matrix as they are, checked: none is copied.

        shape: (out, in). TypeError and ValueError as `QuantizedMatrix.from_parts` has them.
        """
        matrix_of((codes, scales, zeros, perm), shape, bits, group_size)
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        (layer.out_features, layer.in_features), layer.bias = shape, None
        layer.bits, layer.group_size = bits, group_size
        layer._register(codes, scales, zeros, perm)
        return layer

    def _register(self, *parts: torch.Tensor | None) -> None:
        for name, part in zip(PARTS, parts, strict=True):
            self.register_buffer(name, part)

    @property
    def matrix(self) -> QuantizedMatrix:
        """The weights as a QuantizedMatrix: on the host in this layer's memory, on a GPU a copy."""
        parts = (self.codes, self.scales, self.zeros, self.perm)
        return matrix_of(parts, self._shape, self.bits, self.group_size)

    @property
    def weight(self) -> torch.Tensor:
        """What stands for the weight (out, in): its form now, its numbers when they are read."""
        return Floats(self)

    def dequantize(self) -> torch.Tensor:
        """Return the weight (out, in) as floats of ``weight_dtype``, a fresh tensor."""
        dtype = str(self.weight_dtype).removeprefix("torch.")
        found = _tensor(self.matrix.dequantize(dtype))
        assert found is not None  # noqa: S101  a matrix has floats
        return found

    def reset_parameters(self) -> NoReturn:
        """Refuse: there are no parameters to draw."""
        raise TypeError(
            "the weights of a QuantLinear are codes, for which no random ones are drawn"
        )

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x W^T + bias`` in x's dtype, under autocast in its; x (..., in_features)."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}; a QuantLinear takes a torch.Tensor.")
        # Where PyTorch need not know of the product, its dispatcher is spared: 13 of 37 us.
        known, bias = wanted(x, None) or x.is_meta, self.bias
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
        parts = {name: self._buffers[name] for name in PARTS}
        self._buffers.update(dict.fromkeys(PARTS))  # out of sight: they follow by a rule of theirs
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(parts)
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        for name, part in parts.items():
            self._buffers[name] = None if part is None else moved(part, fn)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # set to tie it, it would be there and take no part
            raise AttributeError(
                "a QuantLinear has no weight to set; its codes are set by load_state_dict"
            )
        super().__setattr__(name, value)

    @property
    def _form(self) -> dict[str, Any]:
        """What shapes alone do not tell; beside the version of the class in what is saved."""
        return {"bits": self.bits, "group_size": self.group_size}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        refuse_while_saving(prefix[:-1])
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {}).update(self._form)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        given = {name: local_metadata[name] for name in self._form if name in local_metadata}
        errors, name = others[-1], prefix[:-1] or "the layer"
        if given and given != self._form:
            errors.append(f"{name} was saved with {given}, but this one has {self._form}")
            return
        scales = state_dict.get(f"{prefix}scales")
        copied = not local_metadata.get("assign_to_params_buffers", False)
        if copied and scales is not None and not _holds(self.scales.dtype, scales):
            errors.append(
                f"{name} was saved with scales in {scales.dtype}, which {self.scales.dtype} "
                "does not hold: make this one with that scale_dtype, or load with assign=True"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    @classmethod
    def _tied(cls, other: QuantLinear, linear: torch.nn.Linear) -> Self:
        """Return the form of a layer whose weight is that of another, in the other's memory."""
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        for name in ("out_features", "in_features", "bits", "group_size", "weight_dtype"):
            setattr(layer, name, getattr(other, name))
        for part in PARTS:
            layer.register_buffer(part, getattr(other, part))
        layer.bias = linear.bias
        layer.train(linear.training)
        return layer


def _holds(dtype: torch.dtype, scales: Any) -> bool:
    if not isinstance(scales, torch.Tensor) or scales.is_meta or scales.dtype == dtype:
        return True
    kept = scales.to(dtype).to(scales.dtype)
    return bool(torch.allclose(kept, scales, rtol=0, atol=0, equal_nan=True))


def _tensor(part: Any) -> torch.Tensor | None:
    """Return a part of a matrix as a tensor: of NumPy's a copy, of a device's the same memory."""
    if part is None:
        return None
    if not isinstance(part, np.ndarray):
        return torch.from_dlpack(part)
    if part.dtype.name == "bfloat16":
        return torch.from_numpy(part.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(part.copy())
