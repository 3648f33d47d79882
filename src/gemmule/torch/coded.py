"""What modules have in common whose weights are codes: where these lie, and how they are saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from gemmule.core.problem import FLOAT4, FLOAT8_CODES
from gemmule.quant.float4 import widened
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.places import reads_floats
from gemmule.quant.rounding import dtype_name
from gemmule.torch.parts import (
    PARTS,
    Parts,
    Shape,
    matrix_of,
    moved,
    ordered,
    placed,
    reordered,
    tensor_of,
)
from gemmule.torch.saving import refuse_while_saving


class Coded(torch.nn.Module):  # type: ignore[misc]
    """A module that holds a `QuantizedMatrix`'s parts as buffers, in the order that is read.

    They are ``codes``, ``scales``, ``zeros`` and ``perm``. They follow to a device, but not to
    another dtype; a state_dict holds copies in layout ``row``. 4-bit floats that go to a GPU where
    no proved kernel reads them become 8-bit codes of the same weights.
    """

    bits: int
    group_size: int | None
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    perm: torch.Tensor | None
    weight_dtype: torch.dtype = torch.float32

    @property
    def _shape(self) -> Shape:
        raise NotImplementedError

    def _register(self, *parts: torch.Tensor | None) -> None:
        for name, part in zip(PARTS, parts, strict=True):
            self.register_buffer(name, part)

    @property
    def format(self) -> str | None:
        """``"mxfp4"`` or ``"nvfp4"`` where codes are 4-bit floats, ``"float8"``, or None."""
        floats = dtype_name(self.codes) == FLOAT8_CODES
        return "float8" if floats else FLOAT4.get(dtype_name(self.scales))

    @property
    def _codes(self) -> str:
        """What a repr says of the codes."""
        if self.format is not None:
            group = f", group_size={self.group_size}" if self.format == "float8" else ""
            return f"format={self.format!r}{group}"
        return f"bits={self.bits}, group_size={self.group_size}"

    @property
    def _parts(self) -> Parts:
        return tuple(self._buffers[name] for name in PARTS)

    def _hold(self, parts: Parts) -> None:
        self._buffers.update(zip(PARTS, parts, strict=True))

    @property
    def matrix(self) -> QuantizedMatrix:
        """The weights as a QuantizedMatrix, in this layer's memory."""
        return matrix_of((self.codes, self.scales, self.zeros, self.perm), self._shape)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        parts = self._parts
        self._hold((None,) * len(PARTS))  # out of sight: they follow by a rule of theirs
        try:
            super()._apply(fn, recurse)
        finally:
            self._hold(parts)
        shown = fn(torch.empty(0, dtype=self.weight_dtype))
        self.weight_dtype = shown.dtype
        if shown.is_cuda and not parts[0].is_cuda and not self._stays_on(shown.device):
            self._widen()
            parts = self._parts
        self._hold(moved(parts, fn, self._shape))
        return self

    def _stays_on(self, device: torch.device) -> bool:
        """Whether codes are read on a GPU as they are."""
        return self.format is None or reads_floats(self.format, str(device))

    def _widen(self) -> None:
        """Hold 8-bit codes of the same weights, not 4-bit floats."""
        wide = widened(self.matrix)
        self._hold(tuple(tensor_of(getattr(wide, part)) for part in PARTS))
        self.bits = wide.bits

    @property
    def _form(self) -> dict[str, Any]:
        """What shapes alone do not tell; beside the version of the class in what is saved."""
        return {"bits": self.bits, "group_size": self.group_size}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        refuse_while_saving(prefix[:-1])
        super()._save_to_state_dict(destination, prefix, keep_vars)
        parts = self._parts
        for name, part, row in zip(PARTS, parts, ordered(parts, self._shape, "row"), strict=True):
            if row is not part:  # of layers that share codes the same copy
                destination[prefix + name] = row
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
        parts, shape = self._parts, self._shape
        rows = reordered(parts, shape, "row")  # what is read or given in, part by part
        self._hold(rows)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        loaded = self._parts
        for key, was, row, now, new in zip(
            PARTS, parts, rows, loaded, placed(loaded, shape), strict=True
        ):
            if now is row is not was:  # others share the tensor that was here
                was.copy_(new)
            self._buffers[key] = was if now is row else new


def _holds(dtype: torch.dtype, scales: Any) -> bool:
    if not isinstance(scales, torch.Tensor) or scales.is_meta or scales.dtype == dtype:
        return True
    kept, scales = scales.to(dtype).to(torch.float64), scales.to(torch.float64)
    return bool(torch.allclose(kept, scales, rtol=0, atol=0, equal_nan=True))
