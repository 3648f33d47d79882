"""Layers that PyTorch would cut or copy over a mesh of processes as DTensors: they are refused.

Tensor parallelism cuts parameters; the codes of a quantised layer are none.
"""

from __future__ import annotations

from typing import Any

SPREAD = (
    "a QuantLinear is not cut or replicated by parallelize_module or distribute_module: its codes "
    "are no parameters. Leave it out of the plan, and cut its matrix instead: "
    "layer.matrix.shard(0, mesh) is what ColwiseParallel would keep of it, .shard(1, mesh) what "
    "RowwiseParallel would; `@` multiplies them with DTensors. fully_shard takes the layer as it "
    "is, and leaves its codes whole."
)


def refuse_spread(*tensors: Any) -> None:
    """Raise TypeError for a DTensor, which a layer's product does not take."""
    if any(hasattr(one, "device_mesh") for one in tensors):
        raise TypeError(SPREAD)
