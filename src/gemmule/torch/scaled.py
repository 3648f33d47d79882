"""`scaled_mm`, with the names and layouts of `torch.nn.functional.scaled_mm`.

What PyTorch's recipes say of scales becomes the shapes that `gemmule.matmul` takes: views, nothing
is copied. Matrices in blocks of 16 and 32 steps (MXFP8, MXFP4, NVFP4) are widened to bfloat16,
which holds each element exactly, and multiplied as such: no kernel here multiplies their codes.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch

from gemmule.api import matmul
from gemmule.core.epilogue import Epilogue
from gemmule.quant.float4 import VALUES

log = logging.getLogger("gemmule")

BLOCK = 128
SCALED = ("TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128")
STEPS = {"BlockWise1x16": 16, "BlockWise1x32": 32}  # of the sum, that share a scale
SWIZZLES = ("NO_SWIZZLE", "SWIZZLE_32_4_4")
ACCUMULATED = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)  # two codes a byte, the first in the low bits


class More(TypedDict, total=False):
    """The keywords of `scaled_mm` that may be left away."""

    swizzle_a: Any
    swizzle_b: Any
    bias: torch.Tensor | None
    output_dtype: torch.dtype | None
    contraction_dim: Sequence[int]
    use_fast_accum: bool


def scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: Any,
    scale_recipe_a: Any,
    scale_b: Any,
    scale_recipe_b: Any,
    **more: Unpack[More],
) -> torch.Tensor:
    """Return the scaled product as `torch.nn.functional.scaled_mm` does, on the CPU as well.

    mat_a, mat_b : matrices (m, k) and (k, n) of float8 or, beside scales of float32, int8; any
        strides. Beside scales by 16 or 32 steps also float4, (m, k / 2) and (k / 2, n).
    scale_a, scale_b : of ``TensorWise`` one number; ``RowWise`` (m, 1), (1, n); ``BlockWise1x128``
        (m, ceil(k / 128)), (n, ceil(k / 128)); ``BlockWise128x128`` (s, ceil(m / 128)), (s, ceil(n
        / 128)), where s is ceil(k / 128) or that rounded up to whole fours. Any strides: those that
        PyTorch asks for are among them. A list of one is as good as the tensor. ``BlockWise1x32``
        (MXFP8, MXFP4) and ``BlockWise1x16`` (NVFP4; in a list, with a second scale ``TensorWise``)
        have one for so many steps of each row of A, or column of B: plain (m, ceil(k / 32)), (n,
        ceil(k / 32)), or swizzled.

    scale_recipe_a, scale_recipe_b : members of `torch.nn.functional.ScalingType`, or their names.
    swizzle_a, swizzle_b : members of `torch.nn.functional.SwizzleType`, or their names.
    bias : (n,), of the result's dtype. output_dtype : bfloat16 (the default), float16 or float32.
    contraction_dim : () or (1, 0), which mean the same.
    use_fast_accum : permits less accurate sums; they are as accurate with it.

    Recipes of A and of B need not be the same; those by 16 or 32 steps go together. ValueError for
    names, shapes and swizzles that do not fit, TypeError for dtypes. No gradients.

    >>> import torch, gemmule.torch
    >>> a, b = (torch.ones(s).to(torch.float8_e4m3fn) for s in ((1, 128), (128, 2)))
    >>> one, columns = torch.ones(1), torch.tensor([[0.5, 0.25]])
    >>> gemmule.torch.scaled_mm(a, b, one, "TensorWise", columns, "RowWise")
    tensor([[64., 32.]], dtype=torch.bfloat16)
    """
    unknown = more.keys() - More.__annotations__.keys()
    if unknown:
        raise TypeError(f"scaled_mm() got an unexpected keyword argument {min(unknown)!r}.")
    if tuple(axis % 2 for axis in more.get("contraction_dim", ())) not in ((), (1, 0)):
        raise ValueError("contraction_dim is () or (1, 0): A's columns by B's rows.")
    dtype = more.get("output_dtype", torch.bfloat16)
    if dtype not in ACCUMULATED:
        raise TypeError(
            f"output_dtype is {dtype}; results are bfloat16, float16 or float32. Round to others "
            "afterwards."
        )
    scales = [_listed(scale_a), _listed(scale_b)]
    recipes = [
        _names(recipe, (*SCALED, *STEPS), f"scale_recipe_{which}")
        for recipe, which in zip((scale_recipe_a, scale_recipe_b), "ab", strict=True)
    ]
    for found, names, which in zip(scales, recipes, "ab", strict=True):
        if len(found) != len(names) or len(names) not in (1, 2):
            raise ValueError(
                f"scale_{which} has {len(found)} scales and scale_recipe_{which} {len(names)}; "
                "give one of each, or of a matrix in blocks of 16 steps two."
            )
    if any(names[0] in STEPS for names in recipes):
        return _widened((mat_a, mat_b), scales, recipes, more).to(dtype)
    if any(len(names) > 1 for names in recipes):
        raise ValueError(f"only BlockWise1x16 has a second scale; recipes are {recipes}.")
    for which in "ab":
        swizzle = _names(more.get(f"swizzle_{which}"), SWIZZLES, f"swizzle_{which}")
        if "SWIZZLE_32_4_4" in swizzle:
            raise ValueError(f"scales {recipes['ab'.index(which)][0]} are not swizzled.")
    bias = more.get("bias")
    return matmul(
        mat_a,
        mat_b,
        scale_a=_laid(scales[0][0], recipes[0][0], 0, mat_a.shape),
        scale_b=_laid(scales[1][0], recipes[1][0], 1, mat_b.shape),
        out_dtype=dtype,
        epilogue=None if bias is None else Epilogue(bias=bias),
    )


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _names(given: Any, known: Sequence[str], what: str) -> list[str]:
    """Return names of names or members of PyTorch's enumerations; ValueError for unknown ones."""
    names = [getattr(one, "name", one) for one in _listed(given)]
    for name in names:
        if name not in known:
            raise ValueError(f"{what} is {name!r}; known are {', '.join(known)}.")
    return names


def _laid(scale: Any, recipe: str, axis: int, shape: Sequence[int]) -> Any:
    """Return the scale of a matrix of this shape as `gemmule.matmul` takes it: a view."""
    size, steps = shape[axis], shape[1 - axis]
    blocks, apart = -(-steps // BLOCK), -(-size // BLOCK)
    padded = -(-blocks // 4) * 4
    each = (size, 1) if axis == 0 else (1, size)
    fits: Mapping[str, Sequence[tuple[int, ...]]] = {
        "TensorWise": ((), (1,), (1, 1)),
        "RowWise": (each, (size,)),
        "BlockWise1x128": ((size, blocks),),
        "BlockWise128x128": ((padded, apart), (blocks, apart)),
    }
    if tuple(scale.shape) not in fits[recipe]:
        raise ValueError(
            f"scale_{'ab'[axis]} has shape {tuple(scale.shape)}; {recipe} of a matrix "
            f"{tuple(shape)} requires {' or '.join(map(str, fits[recipe]))}."
        )
    if recipe == "BlockWise1x128":
        return scale if axis == 0 else scale.t()
    if recipe == "BlockWise128x128":
        return scale[:blocks].t() if axis == 0 else scale[:blocks]
    return scale


def _widened(
    matrices: Sequence[Any],
    scales: Sequence[list[Any]],
    recipes: Sequence[list[str]],
    more: Mapping[str, Any],
) -> Any:
    """Return the product of matrices in blocks of 16 or 32 steps, in float32."""
    if recipes[0][0] != recipes[1][0] or any(
        names[1:] not in ([], ["TensorWise"]) for names in recipes
    ):
        raise ValueError(f"blocks of 16 or 32 steps go with their like; recipes are {recipes}.")
    _say(recipes[0][0])
    lines = []
    for axis, (matrix, found) in enumerate(
        zip((matrices[0], matrices[1].t()), scales, strict=True)
    ):
        which = f"swizzle_{'ab'[axis]}"
        swizzle = _names(more.get(which), SWIZZLES, which)
        steps = STEPS[recipes[axis][0]]
        lines.append(_exact(matrix, found[0], steps, swizzled=swizzle[:1] == ["SWIZZLE_32_4_4"]))
    product = matmul(lines[0], lines[1].t(), out_dtype=torch.float32)
    for found in scales:
        if found[1:]:
            product *= found[1].reshape(())
    bias = more.get("bias")
    return product if bias is None else product + bias


@functools.cache
def _say(recipe: str) -> None:
    log.warning("%s: no kernel multiplies such codes; they are widened to bfloat16", recipe)


def _exact(lines: Any, scale: Any, steps: int, *, swizzled: bool) -> Any:
    """Return lines along the sum, times the scale of every so many steps, in bfloat16: exact."""
    if lines.dtype == _FLOAT4:
        codes = lines.contiguous().view(torch.uint8)
        table = torch.tensor(VALUES, dtype=torch.bfloat16, device=codes.device)
        wide = table[torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()]
    else:
        wide = lines.to(torch.bfloat16)
    size, blocks = wide.shape[0], -(-wide.shape[1] // steps)
    if swizzled:
        down, across = -(-size // 128), -(-blocks // 4)
        _check(scale, math.prod((down, 128, across, 4)), wide.shape, steps)
        tiles = scale.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
        scale = tiles.reshape(down * 128, across * 4)[:size, :blocks]
    else:
        _check(scale, size * blocks, wide.shape, steps)
        scale = scale.reshape(size, blocks)
    each = scale.to(torch.bfloat16).repeat_interleave(steps, 1)
    return wide * each[:, : wide.shape[1]]


def _check(scale: Any, count: int, shape: Sequence[int], steps: int) -> None:
    if scale.numel() != count:
        raise ValueError(
            f"a scale has {scale.numel()} elements; {count} are those of lines {tuple(shape)} by "
            f"{steps} steps each. Swizzled ones are padded to whole tiles of 128 by 4."
        )
