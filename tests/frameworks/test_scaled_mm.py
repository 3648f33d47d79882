"""`gemmule.torch.scaled_mm` beside the definition of PyTorch's: recipes, layouts, swizzles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
functional = pytest.importorskip("torch.nn.functional")
if not hasattr(functional, "ScalingType"):
    pytest.skip("PyTorch before 2.10 has no scaled_mm", allow_module_level=True)

from gemmule.quant.float4 import VALUES  # noqa: E402
from gemmule.torch import scaled_mm  # noqa: E402

RECIPES = ("TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128")
M, N, K = 150, 270, 600  # ragged last blocks everywhere, five blocks of steps


def spread(recipe: str, size: int, steps: int) -> tuple[Any, Any]:
    """Return a scale as PyTorch lays it for (size, steps), and one for each element of that."""
    blocks, apart = -(-steps // 128), -(-size // 128)
    if recipe == "TensorWise":
        scale = torch.rand(1) + 0.5
        return scale, scale.expand(size, steps)
    if recipe == "RowWise":
        scale = torch.rand(size, 1) + 0.5
        return scale, scale.expand(size, steps)
    rows = size if recipe == "BlockWise1x128" else apart
    scale = torch.rand(rows, blocks) + 0.5
    wide = scale.repeat_interleave(-(-size // rows) if rows == size else 128, 0)[:size]
    wide = wide.repeat_interleave(128, 1)[:, :steps]
    if recipe == "BlockWise1x128":  # the rows lie side by side
        return scale.t().contiguous().t(), wide
    padded = torch.full((rows, -(-blocks // 4) * 4), float("nan"))
    padded[:, :blocks] = scale
    return padded.t(), wide


@pytest.mark.parametrize("recipes", list(itertools.product(RECIPES, repeat=2)), ids=" by ".join)
def test_recipes(recipes: tuple[str, str]) -> None:
    torch.manual_seed(hash(recipes) % 1000)
    a = torch.randn(M, K).to(torch.float8_e4m3fn)
    b = torch.randn(N, K).to(torch.float8_e5m2).t()
    scale_a, wide_a = spread(recipes[0], M, K)
    scale_b, wide_b = spread(recipes[1], N, K)
    if recipes[1] == "RowWise":
        scale_b = scale_b.t()
    left, right = a.double() * wide_a, b.double() * wide_b.t()
    exact, size = left @ right, left.abs() @ right.abs()
    kinds = [getattr(functional.ScalingType, recipes[0]), recipes[1]]  # members, or their names
    bias = torch.randn(N)
    for given, dtype, u in ((None, torch.bfloat16, 2.0**-8), (bias, torch.float32, 2.0**-22)):
        more = {} if given is None else {"bias": bias, "output_dtype": dtype}
        found = scaled_mm(a, b, scale_a, kinds[0], scale_b, [kinds[1]], use_fast_accum=True, **more)
        assert found.dtype == dtype
        full = exact if given is None else exact + bias.double()
        assert ((found.double() - full).abs() <= u * full.abs() + K * 2.0**-22 * size).all()


def swizzled(scale: Any) -> Any:
    """Return scales in the order 32 x 4 x 4, padded, by the definition: one element at a time."""
    rows, blocks = scale.shape
    down, across = -(-rows // 128), -(-blocks // 4)
    flat = torch.zeros(down * across * 512, dtype=torch.uint8)
    for i, j in itertools.product(range(rows), range(blocks)):
        at = (i // 128 * across + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
        flat[at] = scale.view(torch.uint8)[i, j]
    return flat.view(scale.dtype)


@pytest.mark.parametrize("form", ["mxfp8", "mxfp4", "nvfp4", "nvfp4 and one more"])
@pytest.mark.parametrize("swizzle", [True, False], ids=["swizzled", "plain"])
def test_blocks_of_few_steps(form: str, swizzle: bool) -> None:
    torch.manual_seed(len(form))
    m, n, k = 150, 70, 160
    steps, recipe = (32, "BlockWise1x32") if form.startswith("mx") else (16, "BlockWise1x16")
    matrices, scales, wide = [], [], []
    for size in (m, n):
        if form == "mxfp8":
            codes = torch.randn(size, k).to(torch.float8_e4m3fn)
            values = codes.double()
        else:
            nibbles = torch.randint(0, 16, (size, k), dtype=torch.uint8)
            codes = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)
            values = torch.tensor(VALUES, dtype=torch.float64)[nibbles.int()]
        if form.startswith("mx"):
            scale = torch.randint(120, 134, (size, k // steps), dtype=torch.uint8)
            scale = scale.view(torch.float8_e8m0fnu)
        else:
            scale = (torch.rand(size, k // steps) + 0.1).to(torch.float8_e4m3fn)
        wide.append(values * scale.double().repeat_interleave(steps, 1))
        matrices.append(codes)
        scales.append([swizzled(scale) if swizzle else scale])
    factor, recipes = 1.0, [recipe]
    if form.endswith("more"):
        for one in scales:
            one.append(torch.tensor([1.5]))
        factor, recipes = 2.25, [recipe, "TensorWise"]
    ways = [getattr(functional.SwizzleType, "SWIZZLE_32_4_4" if swizzle else "NO_SWIZZLE")] * len(
        recipes
    )
    given = (matrices[0], matrices[1].t(), scales[0], recipes, scales[1], recipes)
    found = scaled_mm(
        *given, swizzle_a=ways, swizzle_b=ways, output_dtype=torch.float32, bias=torch.ones(n)
    )
    exact, size = factor * wide[0] @ wide[1].t() + 1, abs(wide[0]) @ abs(wide[1].t()) * factor
    assert ((found.double() - exact).abs() <= k * 2.0**-23 * (size + 1)).all()


def test_what_is_refused() -> None:
    a, b = (torch.ones(s).to(torch.float8_e4m3fn) for s in ((4, 256), (256, 8)))
    one, rows, whole = torch.ones(1), torch.ones(4, 1), "TensorWise"
    coarse, fine = "BlockWise128x128", "BlockWise1x128"
    for scale_a, recipe_a, scale_b, recipe_b, words in (
        (one, "Tensorwise", one, whole, "known are TensorWise"),
        (rows, whole, one, whole, r"requires \(\) or"),
        (one, whole, rows, "RowWise", r"scale_b .* \(1, 8\)"),
        (torch.ones(2, 4), fine, one, whole, r"\(4, 2\)"),
        (one[None], coarse, one, whole, r"\(2, 1\)"),
        ([one, one], whole, one, whole, "2 scales"),
        ([one, one], [whole, whole], one, whole, "only BlockWise1x16"),
        (one, "BlockWise1x32", one, whole, "with their like"),
        (one, "BlockWise1x32", one, "BlockWise1x32", "1 elements; 32 are"),
    ):
        with pytest.raises(ValueError, match=words):
            scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b)
    for more, error, words in (
        ({"swizzle_b": "SWIZZLE_32_4_4"}, ValueError, "TensorWise are not swizzled"),
        ({"contraction_dim": (0, 1)}, ValueError, "contraction_dim"),
        ({"output_dtype": None}, TypeError, "output_dtype"),
        ({"output_dtype": torch.float8_e4m3fn}, TypeError, "output_dtype"),
        ({"biass": one}, TypeError, "biass"),
    ):
        with pytest.raises(error, match=words):
            scaled_mm(a, b, one, whole, one, whole, **more)
    with pytest.raises(TypeError, match="scales are float32"):
        scaled_mm(a, b, one.double(), whole, one, whole)
