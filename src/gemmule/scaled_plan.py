"""`ScaledPlan`: how a product with scales is computed, told before it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmule.arrays.interop import unwrap_all
from gemmule.backends.cuda.scaled import ScaledLauncher
from gemmule.backends.explained import explained
from gemmule.core.canonical import NAMES, Options
from gemmule.core.choice import Choice
from gemmule.core.operand import Form
from gemmule.plan import Plan
from gemmule.scaled import (
    Lie,
    Scales,
    apart,
    fused,
    kernels_for,
    result_dtype,
    result_shape,
    scaled_product,
    scales_of,
    without_kernel,
)


@dataclass(frozen=True, eq=False, repr=False)
class ScaledPlan:
    """A scaled product of operands and scales like those given; frozen.

    ``plan(A, B, scale_a=, scale_b=)`` computes; `explain()` tells by what rung, why, and
    whether the kernel that multiplies applies the scales.

    >>> import numpy as np, gemmule as gm
    >>> A = np.ones((2, 256), np.int8)
    >>> plan = gm.plan("matmul", A, A.T, scale_a=np.float32([[1, 2], [3, 4]]), scale_b=0.5)
    >>> plan(A, A.T, scale_a=np.float32([[1, 2], [3, 4]]), scale_b=0.5)
    array([[192., 192.],
           [448., 448.]], dtype=float32)
    >>> plan.explain().splitlines()[-1]
    'scales     2 x 2 and 1, of blocks: A and B are scaled first and multiplied in float32'
    """

    options: Options
    lie: Lie
    scales: Scales
    by: ScaledLauncher | Plan  # the kernel that scales, or the plan of a product without

    def __repr__(self) -> str:
        return f"ScaledPlan({self.choice.problem.describe()} on {self.lie.device})"

    @property
    def choice(self) -> Choice:
        """The rung that multiplies, with its parameters and why."""
        return self.by.choice

    def __call__(self, a: Any, b: Any, /, *, scale_a: Any, scale_b: Any, out: Any = None) -> Any:
        """Compute the planned product; ValueError for operands and scales that lie otherwise."""
        given = planned(a, b, (scale_a, scale_b), self.options)
        if given.lie != self.lie:
            raise ValueError(f"{self!r} was given operands or scales of other shapes or strides.")
        return scaled_product(a, b, scale_a, scale_b, out, self.options)

    def explain(self) -> str:
        """Return what runs, why, what it should cost, and what applies the scales."""
        if isinstance(self.by, ScaledLauncher):
            lines, words = (
                explained("matmul", self.choice, self.by),
                "by the kernel that multiplies",
            )
        else:
            lines, words = [self.by.explain()], without_kernel(self.lie.kernels)
            words = words if self.lie.device != "cpu" else words.partition("; ")[2]
        return "\n".join([*lines, f"scales     {self.scales.words()}: {words}"])


def planned(a: Any, b: Any, scales: tuple[Any, Any], options: Options) -> ScaledPlan:
    """Return the plan of a scaled product."""
    left, right, _ = unwrap_all(a, b, NAMES["matmul"], None)
    dtype = result_dtype(left.form.dtype, right.form.dtype, options.out_dtype)
    shape = result_shape(left.form.shape, right.form.shape)
    found = scales_of(*scales, (*shape, left.form.shape[1]), left)
    kernels, out = kernels_for(found, shape[1]), Form.packed(shape, dtype)
    lie = Lie(left.form, right.form, out, left.device, kernels)
    by: ScaledLauncher | Plan | None = None
    if left.device != "cpu" and 0 not in shape:
        by = fused(lie, dtype, options)
    if by is None:
        by = apart(left.form, right.form, left.device, options, by_blocks=found.by_blocks)
    return ScaledPlan(options, lie, found, by)
