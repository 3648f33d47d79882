"""Layers that PyTorch would cut or copy over a mesh of processes as DTensors: they are refused.

Tensor parallelism cuts parameters; the codes of a quantised layer are none.
"""

from __future__ import annotations

from typing import Any

SPREAD = (
    "a QuantLinear is not cut or replicated by PyTorch's own styles or distribute_module: its "
    "codes are no parameters. In the plan of parallelize_module, give it "
    "gemmule.torch.ColwiseQuant() or RowwiseQuant() in the place of ColwiseParallel() or "
    "RowwiseParallel(). fully_shard takes the layer as it is, and leaves its codes whole."
)


def refuse_spread(*tensors: Any) -> None:
    """Raise TypeError for a DTensor, which a layer's product does not take."""
    if any(hasattr(one, "device_mesh") for one in tensors):
        raise TypeError(SPREAD)
