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

import logging
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch

from gemmule.dispatch.tracked import wanted
from gemmule.frameworks.autograd import autocast
from gemmule.quant import checks, rounding
from gemmule.quant.files import named_dtype
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize
from gemmule.torch.quantized_linear import PARTS, matrix_of, run
from gemmule.torch.replacing import memory, moved, places, refuse, take_over
from gemmule.torch.saving import guard, refuse_while_saving

log = logging.getLogger("gemmule")
Filter = Callable[[str, torch.nn.Linear], bool]


class QuantLinear(torch.nn.Module):  # type: ignore[misc]
    """``x W^T + bias`` with W quantised: what stands in for `torch.nn.Linear`.

    Its buffers are a `QuantizedMatrix`'s parts in layout ``row``: ``codes``, ``scales``, ``zeros``
    (None when symmetric) and ``perm`` (None without one). A state_dict holds them and ``bias``, and
    loads into a layer made with the same options (one with ``perm`` into one that has it). Another
    ``bits`` or ``group_size`` is an error where shapes tell, or the metadata of a state_dict, which
    `torch.save` keeps and safetensors does not. ``.half()``, ``.to(dtype)`` and ``.type(dtype)``
    leave the numbers as they are: x decides in which dtype is computed. Sums are kept in float32
    for halves.

    Make one from a layer (`from_linear`), from a matrix (`from_matrix`), or empty, to load into.
    """

    bits: int
    group_size: int | None
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
        for name, part in parts.items():
            self._buffers[name] = None if part is None else moved(part, fn)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # set to tie it, it would be there and take no part
            raise AttributeError(
                "a QuantLinear has no weight; its codes are set by load_state_dict"
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
        for name in ("out_features", "in_features", "bits", "group_size"):
            setattr(layer, name, getattr(other, name))
        for part in PARTS:
            layer.register_buffer(part, getattr(other, part))
        layer.bias = linear.bias
        layer.train(linear.training)
        return layer


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
    ``method``, ``symmetric``, ``scale_dtype``.

    A layer that stands in several places stays one, and layers that share a weight share its
    codes, in memory, after ``.to(device)`` too. Where the other is not quantised, such as an
    embedding, the two are tied no more, and the logger ``gemmule`` warns of it. Forward and
    backward hooks, attributes, buffers and what stands within a layer go with it; hooks of the
    weight itself do not.

    ``save_pretrained`` of a model of transformers is a ValueError from then on, as
    ``from_pretrained`` would answer with random weights: save its state_dict by `torch.save`.

    ValueError where the model is itself a linear layer: use `QuantLinear.from_linear`; and, with
    nothing replaced, for layers whose weight hooks compute (pruned, normalised), that have hooks of
    their state_dict, or a ``forward`` of their own, which would not be what they were. Layers of
    `torch.nn.utils.parametrize` are subclasses, and stay. The old layer, where another model keeps
    it, shares its hooks from then on. Errors of
    `gemmule.quantize` name the layer; those before it are replaced then.

    >>> import torch, gemmule.torch.linear as gl
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
    >>> gl.quantize_(model, filter=lambda name, layer: layer.out_features > 2)
    Sequential(
      (0): QuantLinear(in_features=64, out_features=64, bits=4, group_size=64, bias=True)
      (1): Linear(in_features=64, out_features=2, bias=True)
    )
    """
    if not isinstance(model, torch.nn.Module) or not (filter is None or callable(filter)):
        raise TypeError(
            f"quantize_ takes a torch.nn.Module and a function as its filter; got {model!r:.60} "
            f"and {filter!r:.60}"
        )
    if type(model) is torch.nn.Linear:
        raise ValueError("the model is one linear layer: use QuantLinear.from_linear")
    taken = list(places(model, filter))
    for _, _, full, linear in taken:  # all of them first: nothing is replaced if one is refused
        _naming(full, refuse, linear, QuantLinear)
    made: dict[torch.nn.Module, QuantLinear] = {}
    weights: dict[Any, tuple[str, QuantLinear]] = {}
    for parent, name, full, linear in taken:
        if linear not in made:
            _, twin = weights.get(memory(linear.weight), (full, None))
            if twin is None:
                chosen = {"bits": bits, "group_size": group_size, **options}
                layer = _naming(full, QuantLinear.from_linear, linear, **chosen)
                weights[memory(linear.weight)] = full, layer
            else:
                layer = QuantLinear._tied(twin, linear)
            take_over(layer, linear)
            made[linear] = layer
        setattr(parent, name, made[linear])
        if isinstance(parent, torch.nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0  # else a kernel of its own wants float weights
    guard(model, QuantLinear)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        full, _ = weights.get(memory(parameter), ("", None))
        if full:
            log.warning(
                "layer %r is quantised, but %r, which had the same weight, is not: they are tied "
                "no more, and the weight stays in memory",
                full,
                name,
            )
    return model


def _holds(dtype: torch.dtype, scales: Any) -> bool:
    if not isinstance(scales, torch.Tensor) or scales.is_meta or scales.dtype == dtype:
        return True
    kept = scales.to(dtype).to(scales.dtype)
    return bool(torch.allclose(kept, scales, rtol=0, atol=0, equal_nan=True))


def _naming(layer: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    try:
        return function(*given, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"layer {layer!r}: {error}") from error


def _tensor(part: Any) -> torch.Tensor | None:
    """Return a part of a matrix as a tensor: of NumPy's a copy, of a device's the same memory."""
    if part is None:
        return None
    if not isinstance(part, np.ndarray):
        return torch.from_dlpack(part)
    if part.dtype.name == "bfloat16":
        return torch.from_numpy(part.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(part.copy())
