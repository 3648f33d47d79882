"""Products inside `jax.jit`, `jax.vmap` and `jax.grad`.

A traced product becomes a call of XLA's (`gemmule.frameworks.xla`): compiled programs compute it on
their own device, in place. Batches become one product of the whole batch, gradients are products.
"""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from gemmule.core.canonical import NAMES, Options, canonical
from gemmule.core.operand import Form
from gemmule.core.problem import check_dtype, numpy_dtype
from gemmule.dispatch.batches import aligned
from gemmule.frameworks import xla

TARGET = "gemmule_product"


def traced(*operands: Any) -> bool:
    """Whether a transformation of JAX's is looking at one of these operands."""
    return any(isinstance(one, jax.core.Tracer) for one in operands)


def check_arrays(out: Any, **operands: Any) -> None:
    """Raise TypeError for what a trace cannot hold."""
    if out is not None:
        raise TypeError("out was given with a JAX tracer, which is immutable. Leave out= away.")
    for name, operand in operands.items():
        if not isinstance(operand, jax.Array):
            raise TypeError(
                f"{name} is a {type(operand).__qualname__} beside a JAX tracer; both must be JAX "
                "arrays. Convert it with jax.numpy.asarray, a quantised matrix with .dequantize()."
            )


def through(op: str, a: Any, b: Any, out: Any, options: Options) -> Any:
    """Return the traced product; TypeError for what a trace cannot hold."""
    check_arrays(out, **dict(zip(NAMES[op], (a, b), strict=True)))
    return _product(op, options, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(op: str, options: Options, a: Any, b: Any) -> Any:
    return _batchable(op, options)(a, b)


def _forward(op: str, options: Options, a: Any, b: Any) -> Any:
    return _product(op, options, a, b), (a, b)


def _backward(op: str, options: Options, kept: Any, grad: Any) -> tuple[Any, Any]:
    """The product is linear in each operand, so its gradients are products with the other."""
    a, b = kept
    plain = Options(precision=options.precision, batch_invariant=options.batch_invariant)

    def product(op: str, a: Any, b: Any) -> Any:
        return _product(op, plain, a, b)

    if op == "matvec":
        of_a, of_b = product("matmul", grad[..., None], b[..., None, :]), product("vecmat", grad, a)
    elif op == "vecmat":
        of_a, of_b = product("matvec", b, grad), product("matmul", a[..., None], grad[..., None, :])
    else:
        left, right = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
        grad = grad[..., None] if b.ndim == 1 else grad
        grad = grad[..., None, :] if a.ndim == 1 else grad
        of_a = _summed(product("matmul", grad, right.mT), left)
        of_b = _summed(product("matmul", left.mT, grad), right)
        return of_a.reshape(a.shape).astype(a.dtype), of_b.reshape(b.shape).astype(b.dtype)
    return _summed(of_a, a), _summed(of_b, b)


def _summed(grad: Any, operand: Any) -> Any:
    """Return a gradient summed over the axes along which its operand was broadcast."""
    lead = grad.ndim - operand.ndim
    grad = grad.sum(tuple(range(lead))) if lead else grad
    axes = tuple(i for i, n in enumerate(operand.shape) if n == 1 != grad.shape[i])
    return (grad.sum(axes, keepdims=True) if axes else grad).astype(operand.dtype)


_product.defvjp(_forward, _backward)


@functools.cache
def _batchable(op: str, options: Options) -> Any:
    """Return the product with its rule for `jax.vmap`."""

    multiply = custom_vmap(lambda a, b: _called(op, options, a, b))

    def rule(size: int, batched: Any, a: Any, b: Any) -> tuple[Any, bool]:
        return _batched(op, batched, a, b, lambda a, b: multiply(a, b)), True

    multiply.def_vmap(rule)
    return multiply


def _batched(op: str, batched: Any, a: Any, b: Any, multiply: Any) -> Any:
    """Return the products of a batch along axis 0 of the operands that have it."""
    shapes, extra = aligned(op, (a.shape, b.shape), batched)
    result = multiply(a.reshape(shapes[0]), b.reshape(shapes[1]))
    for axis in extra:
        result = result.squeeze(axis)
    return result


def _called(op: str, options: Options, a: Any, b: Any) -> Any:
    """Return the call of a program of XLA's; shapes and dtypes are checked here."""
    left, right = (
        Form.packed(t.shape, check_dtype(t.dtype.name, name))
        for name, t in zip(NAMES[op], (a, b), strict=True)
    )
    call = canonical(op, left, right, None, options)
    result = jax.ShapeDtypeStruct(call.out_shape, numpy_dtype(call.problem.out))
    return ffi_call(op, options, result, a, b)


def ffi_call(op: str, options: Options, result: Any, *operands: Any) -> Any:
    """Return the call of a program of XLA's that computes `result`, a shape and a dtype."""
    if jax.dtypes.canonicalize_dtype(result.dtype) != result.dtype:
        raise TypeError(
            f"the result is {result.dtype}, which JAX holds only with jax_enable_x64. "
            "Enable it, or pass a 32-bit out_dtype."
        )
    _register()
    names = ("out_dtype", "precision", "accumulate", "batch_invariant", "literal", "rung", "params")
    given = {"op": op} | {name: getattr(options, name) for name in names}
    return jax.ffi.ffi_call(TARGET, result)(*operands, given=json.dumps(given))


@functools.cache
def _register() -> None:
    if not hasattr(jax, "ffi"):
        raise TypeError(
            f"JAX {jax.__version__} has no jax.ffi, by which a compiled program calls a product; "
            "install 0.5 or newer, or call the product outside the transformed function."
        )
    for platform, handler in (("cpu", xla.on_host), ("CUDA", xla.on_device)):
        capsule = jax.ffi.pycapsule(ctypes.cast(handler, ctypes.c_void_p))
        jax.ffi.register_ffi_target(TARGET, capsule, platform=platform)
