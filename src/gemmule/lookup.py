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
from gemmule.core.epilogue import Epilogue
from gemmule.core.grouped import Routing
from gemmule.dispatch import host
from gemmule.finished import finished_product, scaled_and_finished
from gemmule.general import compiled, product, untraced
from gemmule.plan import resolve
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.routed import routed_product
from gemmule.scaled import scaled_product
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
        if device is None and out is None:
            from gemmule.dispatch import torch_host

            views = torch_host.arrays(a, b)
            if views is not None:
                return torch_host.tensor(multiply(op, *views, None, options, None))
    if "jax" in sys.modules and device is None:
        from gemmule.frameworks import jax as jax_calls  # only where JAX is

        if jax_calls.traced(a, b):
            return jax_calls.through(op, a, b, out, options)
    return product(op, a, b, out, options, device)


def multiply_grouped(
    a: Any, w: Any, offsets: Any, out: Any, options: Options, routing: Routing | None = None
) -> Any:
    """Return the grouped product of the user's operands, by the operator where PyTorch asks it."""
    given = a, w, offsets, out, options, routing
    if "torch" in sys.modules:
        from gemmule.dispatch.tracked import wanted  # only where PyTorch is

        weights = None if routing is None else routing.weights
        if wanted(a, w) or (weights is not None and wanted(weights, weights)):
            from gemmule.frameworks import grouped as operator

            return operator.through(*given)
    if "jax" in sys.modules:
        from gemmule.frameworks import jax_grouped  # only where JAX is

        if jax_grouped.wanted(a, w, offsets, routing):
            return jax_grouped.through(*given)
    return untraced(routed_product, *given) if compiled() else routed_product(*given)


def multiply_finished(a: Any, b: Any, epilogue: Any, out: Any, options: Options) -> Any:
    """Return the product of the user's operands with an epilogue; PyTorch learns nothing of it."""
    _refuse_gradients(a, b, epilogue)
    return untraced(finished_product, a, b, epilogue, out, options)


def _refuse_gradients(a: Any, b: Any, epilogue: Any) -> None:
    """Raise ValueError where PyTorch would have to know of an epilogue."""
    if "torch" in sys.modules and isinstance(epilogue, Epilogue):
        from gemmule.dispatch.tracked import refuse_blas  # only where PyTorch is

        refuse_blas("an epilogue", (a, b, *epilogue.operands().values()))


def multiply_scaled(
    a: Any, b: Any, scales: tuple[Any, Any], out: Any, options: Options, epilogue: Any = None
) -> Any:
    """Return the scaled product of the user's operands, by the operator where PyTorch asks it."""
    if epilogue is not None:
        _refuse_gradients(a, b, epilogue)
        return untraced(scaled_and_finished, (a, b, *scales), epilogue, out, options)
    if "torch" in sys.modules:
        from gemmule.dispatch.tracked import wanted  # only where PyTorch is

        if wanted(a, b):
            from gemmule.frameworks import scaled as operator

            return operator.through(a, b, *scales, out, options)
    if compiled():
        return untraced(scaled_product, a, b, *scales, out, options)
    return scaled_product(a, b, *scales, out, options)


def _host_call(key: Any, op: str, a: Any, b: Any, options: Options) -> host.FastCall:
    """Return the bound call of operands on the host, kept by their key."""
    left, right = host.form(a), host.form(b)
    if left is None or right is None:  # such as misaligned: others of the same key may do
        return host.general
    fast_path = resolve(op, left, right, None, "cpu", options).fast_path
    if len(_calls) >= MOST:
        _calls.clear()
    call: host.FastCall = host.general if fast_path is None else fast_path.call
    _calls[key] = call
    return call


def _of_tensors(
    op: str, given: tuple[Any, Any, Any], options: Options, met: Any | None
) -> Any | None:
    """Return the product of operands on a device by the fast path, or None: there is none."""
    signatures = signatures_of(*given[:2])
    bound = None if signatures is None else bound_product(op, *signatures, options)
    result = None if bound is None else bound(*given)
    if result is not None and met is not None:
        met.keep(op, given, bound)
    return result


def signatures_of(a: Any, b: Any) -> tuple[Any, Any] | None:
    """Return what tells operands on a device apart, or None: they are for the general path."""
    coded = type(b) is QuantizedMatrix and b.device != "cpu"
    if not getattr(a if coded else b, "is_cuda", False) or "torch" not in sys.modules:
        return None
    torch_calls = _torch_calls()
    if torch_calls.wanted(a, b):
        return None
    seen_a, seen_b = torch_calls.seen(a), torch_calls.seen(b)
    return None if seen_a is None or seen_b is None else (seen_a, seen_b)


_loaded: list[Any] = []  # what tells PyTorch's tensors apart, once it was imported
_met: list[Any] = []  # and the calls of tensors met before


def _torch_calls() -> Any:
    """Return what tells PyTorch's tensors apart; an import statement costs half a microsecond."""
    if not _loaded:
        from gemmule.dispatch import torch_repeats  # only where PyTorch is

        _loaded.append(torch_repeats)
        _met.append(torch_repeats.REPEATS)
    return _loaded[0]


@remembered(4096)
def bound_product(op: str, seen_a: Any, seen_b: Any, options: Options) -> Any:
    """Return the bound call (a, b, out) for operands of these signatures, or None."""
    torch_calls = _torch_calls()
    if seen_b[3] != seen_a[3]:
        return None
    left, right = torch_calls.form(seen_a), torch_calls.form(seen_b)
    fast_path = resolve(op, left, right, None, f"cuda:{seen_a[3]}", options).fast_path
    return None if fast_path is None else fast_path.call
