"""From a call's operands to its product: one look-up, then the kernel.

The cache goes from what tells the operands apart (dtype, shape, strides, device) to a bound call,
so a product met before costs a look-up and a launch. What has no fast path goes the general one
(`gemmule.general`): operands are unwrapped, checked and planned, and the plan runs on them.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gemmule.core.caches import remembered, table
from gemmule.core.canonical import DEFAULT, Options
from gemmule.dispatch import host
from gemmule.dispatch.bind import bind_with_bias
from gemmule.general import compiled, product
from gemmule.plan import resolve
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.settings import default_device

MOST = 4096  # bound calls of host operands
_calls = table()  # of host operands, by what tells them apart
_Array = np.ndarray


def multiply(op: str, a: Any, b: Any, out: Any, options: Options, device: str | None) -> Any:
    """Return the product of the user's operands, by the fast path where there is one."""
    if device is None:
        if type(a) is _Array and type(b) is _Array:
            key: Any = (op, a.dtype, a.shape, a.strides, b.dtype, b.shape, b.strides)
            met = None
        else:
            met = _met[0] if _met and options is DEFAULT else None
            result = None if met is None else met.again(op, a, b, out)
            if result is not None:
                return result
            key = host.key(op, a, b)
        if key is None:
            result = _of_tensors(op, (a, b, out), options, met)
        elif default_device() not in (None, "cpu") or (
            "torch._dynamo" in sys.modules and compiled()
        ):
            result = None
        else:
            if options is not DEFAULT:  # which would be slow to hash
                key = (key, options)
            call = _calls.get(key) or _host_call(key, op, a, b, options)
            result = call(a, b, out)
        if result is not None:
            return result
    if "torch" in sys.modules:
        from gemmule.dispatch.tracked import wanted  # only where PyTorch is
        from gemmule.frameworks import autograd

        if wanted(a, b):
            if device is not None:
                raise ValueError(
                    f"{op} was given device={device!r} with tensors that require a gradient, are "
                    "traced, or lie under torch.vmap or autocast; a copy would lose that. Leave it "
                    "away, and move tensors with their own .to()."
                )
            return autograd.through(op, a, b, out, options)
    if "jax" in sys.modules and device is None:
        from gemmule.frameworks import jax as jax_calls  # only where JAX is

        if jax_calls.traced(a, b):
            return jax_calls.through(op, a, b, out, options)
    return product(op, a, b, out, options, device)


def _host_call(key: Any, op: str, a: Any, b: Any, options: Options) -> host.FastCall:
    """Return the bound call of operands on the host, kept by their key."""
    left, right = host.form(a), host.form(b)
    if left is None or right is None:  # such as misaligned: others of the same key may do
        return host.general
    fast_path = resolve(op, left, right, None, "cpu", options).short_way
    if len(_calls) >= MOST:
        _calls.clear()
    call: host.FastCall = host.general if fast_path is None else fast_path.checked
    _calls[key] = call
    return call


def _of_tensors(
    op: str, given: tuple[Any, Any, Any], options: Options, met: Any | None
) -> Any | None:
    """Return the product of operands on a device, and of `out`, by the fast path, if it has one."""
    signatures = _signatures(*given)
    bound = None if signatures is None else _bound(op, *signatures, options)
    result = None if bound is None else bound(*given)
    if result is not None and met is not None:
        met.keep(op, given, bound)
    return result


def _signatures(a: Any, b: Any, out: Any) -> tuple[Any, Any, Any] | None:
    """Return what tells operands on a device, and `out`, apart, or None: for the general path."""
    coded = type(b) is QuantizedMatrix and b.device != "cpu"
    if not getattr(a if coded else b, "is_cuda", False) or "torch" not in sys.modules:
        return None
    torch_calls = _torch_calls()
    if torch_calls.wanted(a, b):
        return None
    seen_a, seen_b = torch_calls.seen(a), torch_calls.seen(b)
    seen_out = None if out is None else torch_calls.seen(out)
    if out is not None and (seen_out is None or getattr(out, "requires_grad", True)):
        return None
    return None if seen_a is None or seen_b is None else (seen_a, seen_b, seen_out)


_loaded: list[Any] = []  # the fast path of PyTorch's tensors, once it was imported
_met: list[Any] = []  # and the calls of tensors met before


def _torch_calls() -> Any:
    """Return the fast path of PyTorch's tensors; an import statement costs half a microsecond."""
    if not _loaded:
        from gemmule.dispatch import torch as torch_calls  # only where PyTorch is
        from gemmule.dispatch.torch_met import Met

        _loaded.append(torch_calls)
        _met.append(Met())
    return _loaded[0]


@remembered(4096)
def _bound(op: str, seen_a: Any, seen_b: Any, seen_out: Any, options: Options) -> Any:
    """Return the bound call (a, b, out) for operands of these signatures, or None."""
    torch_calls = _torch_calls()
    if seen_b[3] != seen_a[3]:
        return None
    left, right = torch_calls.form(seen_a), torch_calls.form(seen_b)
    if left is None or right is None:
        return None
    short_way = resolve(op, left, right, None, f"cuda:{seen_a[3]}", options).short_way
    if short_way is None or (
        seen_out is not None and getattr(short_way, "out_seen", None) != seen_out
    ):
        return None
    return short_way.trusted


def below(op: str, a: Any, b: Any, options: Options, bias: Any = None) -> Any:
    """Return a tensor's product by the fast path or else the general one; as `product` does.

    bias: a tensor that is added to it, where a kernel can in the same launch.
    """
    if bias is not None:
        added = _below_with_bias(a, b, bias) if op == "matvec" and options is DEFAULT else None
        return below(op, a, b, options).add_(bias.detach()) if added is None else added
    torch_calls = _torch_calls()
    seen_a, seen_b = torch_calls.seen(a), torch_calls.seen(b)
    if seen_a is not None and seen_b is not None:
        short_way = _bound(op, seen_a, seen_b, None, options)
        result = None if short_way is None else short_way(a, b, None)
        if result is not None:
            return result
    return product(op, a, b, None, options)


def _below_with_bias(matrix: Any, x: Any, bias: Any) -> Any | None:
    """Return ``matrix @ x + bias`` of one launch, or None where there is none that does it."""
    there = x.is_cuda and bias.get_device() == x.get_device() and bias.dtype == x.dtype
    if not there or not bias.is_contiguous() or bias.is_neg():
        return None  # kernels read a bias as it lies
    torch_calls = _torch_calls()
    seen_matrix, seen_x = torch_calls.seen(matrix), torch_calls.seen(x)
    if seen_matrix is None or seen_x is None or seen_matrix[3] != seen_x[3]:
        return None
    added = _bound_with_bias(seen_matrix, seen_x)
    return None if added is None else added(matrix, x, bias)


@remembered(4096)
def _bound_with_bias(seen_matrix: Any, seen_x: Any) -> Any:
    torch_calls = _torch_calls()
    left, right = torch_calls.form(seen_matrix), torch_calls.form(seen_x)
    if left is None or right is None:
        return None
    plan = resolve("matvec", left, right, None, f"cuda:{seen_x[3]}", DEFAULT)
    return bind_with_bias(plan._run, plan.choice, plan.device)
