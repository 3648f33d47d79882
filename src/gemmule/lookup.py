"""From a call's operands to its product: one look-up, then the kernel.

The cache goes from the operands' signatures (dtype, shape, strides, device) to a bound call, so a
product met before costs a look-up and a launch. What has no short way goes the general way:
operands are unwrapped, checked and planned, and the plan runs on them.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from gemmule.arrays.prepared import PreparedMatrix
from gemmule.core.canonical import DEFAULT, NAMES, Options
from gemmule.core.operand import Form, Operand, speaker
from gemmule.dispatch import general, host
from gemmule.outofcore.through import through_device
from gemmule.plan import operands, rebound, resolve
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.settings import default_device


def multiply(op: str, a: Any, b: Any, out: Any, options: Options, device: str | None) -> Any:
    """Return the product of the user's operands, by the short way where there is one."""
    if device is None:
        met = _met[0] if _met and options is DEFAULT else None
        if met is not None:
            result = met.again(op, a, b, out)
            if result is not None:
                return result
        signatures = _signatures(a, b)
        if signatures is not None:
            product = _bound(op, *signatures, options)
            if product is not None:
                result = product(a, b, out)
                if result is not None:
                    if met is not None:
                        met.keep(op, (a, b, out), product)
                    return result
    return _general(op, a, b, out, options, device)


def _signatures(a: Any, b: Any) -> tuple[Any, Any] | None:
    """Return what tells the operands apart, or None: they are for the general way."""
    kind = type(b)
    coded = kind is QuantizedMatrix and b.device != "cpu"
    of_host = kind is np.ndarray or (kind is QuantizedMatrix and not coded)
    if of_host or (kind is PreparedMatrix and not b.is_cuda):
        if default_device() not in (None, "cpu"):
            return None
        if "torch._dynamo" in sys.modules and general.compiled():
            return None
        seen_a, seen_b = host.seen(a), host.seen(b)
        return None if seen_a is None or seen_b is None else (seen_a, seen_b)
    if getattr(a if coded else b, "is_cuda", False) and "torch" in sys.modules:
        torch_calls = _torch_calls()
        if torch_calls.wanted(a, b):
            return None
        seen_a, seen_b = torch_calls.seen(a), torch_calls.seen(b)
        return None if seen_a is None or seen_b is None else (seen_a, seen_b)
    return None


_loaded: list[Any] = []  # what tells PyTorch's tensors apart, once it was imported
_met: list[Any] = []  # and the calls of tensors met before


def _torch_calls() -> Any:
    """Return what tells PyTorch's tensors apart; an import statement costs half a microsecond."""
    if not _loaded:
        from gemmule.dispatch import torch_repeats  # only where PyTorch is

        _loaded.append(torch_repeats)
        _met.append(torch_repeats.REPEATS)
    return _loaded[0]


@functools.lru_cache(maxsize=4096)
def _bound(op: str, seen_a: Any, seen_b: Any, options: Options) -> Any:
    """Return the bound call (a, b, out) for operands of these signatures, or None."""
    on_host = isinstance(seen_a, Form) or isinstance(seen_a[0], np.dtype)
    if on_host:
        left, right, device = host.form(seen_a), host.form(seen_b), "cpu"
    else:
        torch_calls = _torch_calls()
        if seen_b[3] != seen_a[3]:
            return None
        left, right = torch_calls.form(seen_a), torch_calls.form(seen_b)
        device = f"cuda:{seen_a[3]}"
    if left is None or right is None:
        return None
    short_way = resolve(op, left, right, None, device, options).short_way
    return None if short_way is None else short_way.trusted


def _general(op: str, a: Any, b: Any, out: Any, options: Options, device: str | None) -> Any:
    if "torch" in sys.modules:
        from gemmule.dispatch import autograd  # only where PyTorch is

        if autograd.wanted(a, b):
            if device is not None:
                raise ValueError(
                    f"{op} was given device={device!r} with tensors that require a gradient, are "
                    "traced, or lie under torch.vmap or autocast; a copy would lose that. Leave it "
                    "away, and move tensors with their own .to()."
                )
            return autograd.through(op, a, b, out, options)
    if "jax" in sys.modules and device is None:
        from gemmule.dispatch import jax as jax_calls  # only where JAX is

        if jax_calls.traced(a, b):
            return jax_calls.through(op, a, b, out, options)
    return product(op, a, b, out, options, device)


def product(op: str, a: Any, b: Any, out: Any, options: Options, device: str | None = None) -> Any:
    """Return the product by the general way; PyTorch learns nothing of it, gradients end here."""
    return general.untraced(_product, op, a, b, out, options, device)


def _product(op: str, a: Any, b: Any, out: Any, options: Options, device: str | None) -> Any:
    left, right, result = operands(a, b, NAMES[op], out)
    away = device_of(left, right, device)
    if away is not None:
        return through_device(op, (left, right), result, away, options)
    form = None if result is None else result.form
    where = speaker(left, right).device
    return resolve(op, left.form, right.form, form, where, options).execute(left, right, result)


def device_of(left: Operand, right: Operand, device: str | None) -> str | None:
    """Return the GPU that host operands were asked to be multiplied on, None for where they lie.

    ValueError where operands on a device were asked to go to another.
    """
    on_host = left.device == "cpu" == right.device
    wanted = default_device() if device is None and on_host else device
    if wanted is not None and wanted != "cpu" and on_host:
        _refuse_prepared(left, right, wanted)
        return wanted
    if device is not None and device not in (left.device, left.device.partition(":")[0]):
        raise ValueError(
            f"device is {device!r}, but the operands lie on {left.device}. Leave device= away: a "
            "product is computed where its operands are."
        )
    return None


def _refuse_prepared(left: Operand, right: Operand, device: str) -> None:
    if left.form.ready is not None or right.form.ready is not None:
        raise ValueError(
            f"a matrix prepared on the host was to be multiplied on {device}, but what is prepared "
            f"stays where it is. Prepare gemmule.asarray(B, device={device!r}), or give the array."
        )


general.product = product


def forget_plans() -> None:
    """Drop cached plans and bound calls, so that the next call sees new tuning results."""
    resolve.cache_clear()
    rebound.cache_clear()
    _bound.cache_clear()
    for met in _met:
        met.forget()
