"""The products as operators of PyTorch: what runs, and what it will look like.

`gemmule.dispatch.autograd` adds their gradients; `gemmule.torch.ops` has the functions to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gemmule.core.canonical import NAMES, Options
from gemmule.core.problem import check_dtype, matmul_shape, matvec_shape, result_dtype
from gemmule.dispatch import general

_OPTIONS = 'ScalarType? out_dtype=None, str precision="float32", bool batch_invariant=False'
LIBRARY = torch.library.Library("gemmule", "DEF")


def refuse_out(op: str, a: Any, b: Any, out: Any) -> None:
    """Raise ValueError where a result written into `out` would lose a gradient."""
    if out is None or not torch.is_grad_enabled():
        return
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in (a, b, out)):
        raise ValueError(
            f"{op} was given out= and a tensor that requires a gradient; a result written into "
            "a given tensor has none. Leave out= away, or call it under torch.no_grad()."
        )


def unseen(what: str) -> ValueError:
    """Return the error for a product that PyTorch would have to know of, and does not."""
    return ValueError(
        f"{what} computes without PyTorch's knowledge, but a tensor requires a gradient, is "
        "traced, or lies under torch.vmap or autocast. Call gemmule.matvec (vecmat, matmul) "
        "there, or do this under torch.no_grad()."
    )


def call(op: str, a: Any, b: Any, *, out: Any = None, **options: Any) -> Any:
    """Call an operator by its name; with `out`, the one that writes there."""
    operators = torch.ops.gemmule
    if out is None:
        return getattr(operators, op).default(a, b, **options)
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed and not torch.compiler.is_compiling():
        raise ValueError(
            f"{op} was given out= under torch.vmap or another transformation of torch.func, "
            "which knows no tensor that is written. Leave out= away."
        )
    getattr(operators, f"{op}_out").default(a, b, out=out, **options)
    return out


# ---- what runs -------------------------------------------------------------------------------
def _kernel(op: str) -> Callable[..., Any]:
    def run(a: Any, b: Any, **options: Any) -> Any:
        return general.product(op, a, b, None, _as_options(options))

    return run


def _out_kernel(op: str) -> Callable[..., None]:
    def run(a: Any, b: Any, *, out: Any, **options: Any) -> None:
        refuse_out(op, a, b, out)
        general.product(op, a, b, out, _as_options(options))

    return run


def _as_options(given: dict[str, Any]) -> Options:
    dtype = given.get("out_dtype")
    return Options(
        None if dtype is None else _name(dtype),
        given.get("precision", "float32"),
        batch_invariant=given.get("batch_invariant", False),
    )


# ---- what it will look like: shapes and dtypes alone --------------------------------------------
def refuse_forward(op: str) -> None:
    """Raise ValueError where a compiled graph would have derivatives of 0: operators know none."""
    if torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0:
        raise ValueError(
            f"{op} is differentiated forwards within torch.compile, which PyTorch's operators do "
            "not take part in. Differentiate outside: torch.func.jvp(function, ...) as it is."
        )


def _result(op: str, a: Any, b: Any, out_dtype: Any) -> tuple[tuple[Any, ...], torch.dtype]:
    """Return shape and dtype of a product; sizes may be symbols. Raises as the product would."""
    refuse_forward(op)
    if a.device != b.device:
        raise TypeError(
            f"{NAMES[op][0]} lies on {a.device} and {NAMES[op][1]} on {b.device}; both must lie on "
            "one device. Move one of them first."
        )
    given = [check_dtype(_name(t.dtype), name) for t, name in zip((a, b), NAMES[op], strict=True)]
    dtype = result_dtype(given[0], given[1], None if out_dtype is None else _name(out_dtype))
    return _shape(op, a.shape, b.shape), getattr(torch, dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(op: str, a: Any, b: Any) -> tuple[Any, ...]:
    if op == "vecmat":
        return _shape("matvec", (*b[:-2], b[-1], b[-2]) if len(b) >= 2 else b, a)
    if op == "matvec":
        core = matvec_shape(tuple(a[-2:]), tuple(b[-1:]))
        return (*_batch(op, a[:-2], b[:-1]), *core)
    if not a or not b:
        raise ValueError(f"matmul does not take 0-D operands; got shapes {a} and {b}.")
    left, right = a if len(a) > 1 else (1, *a), b if len(b) > 1 else (*b, 1)
    rows, columns = matmul_shape(tuple(left[-2:]), tuple(right[-2:]))
    core = ((rows,) if len(a) > 1 else ()) + ((columns,) if len(b) > 1 else ())
    return (*_batch(op, left[:-2], right[:-2]), *core)


def _batch(op: str, left: Any, right: Any) -> tuple[Any, ...]:
    try:
        return tuple(torch.broadcast_shapes(left, right))
    except RuntimeError:
        raise ValueError(
            f"{op}: batch dimensions {tuple(left)} and {tuple(right)} do not broadcast together; "
            "each pair must be equal, or one of them 1."
        ) from None


def _fake(op: str) -> Callable[..., Any]:
    def look(a: Any, b: Any, *, out_dtype: Any = None, **options: Any) -> Any:
        shape, dtype = _result(op, a, b, out_dtype)
        return a.new_empty(shape, dtype=dtype)

    return look


def _out_fake(op: str) -> Callable[..., None]:
    def look(a: Any, b: Any, *, out: Any, out_dtype: Any = None, **options: Any) -> None:
        shape, dtype = _result(op, a, b, out_dtype)
        if tuple(out.shape) != shape:
            raise ValueError(f"out has shape {tuple(out.shape)}; the result has shape {shape}.")
        if out.dtype != dtype:
            raise TypeError(
                f"out has dtype {out.dtype}; the result has dtype {dtype}. "
                "Pass an out of that dtype, or out_dtype= to choose another."
            )

    return look


def _define() -> None:
    """Define and implement the operators on every device of the package."""
    for op, (a, b) in NAMES.items():
        name = f"gemmule::{op}"
        tags = (torch.Tag.pt2_compliant_tag,)
        operands = f"Tensor {a}, Tensor {b}, *"
        LIBRARY.define(f"{op}({operands}, {_OPTIONS}) -> Tensor", tags=tags)
        LIBRARY.define(f"{op}_out({operands}, Tensor(a!) out, {_OPTIONS}) -> ()", tags=tags)
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(op, _kernel(op), key)
            LIBRARY.impl(f"{op}_out", _out_kernel(op), key)
        torch.library.register_fake(name, _fake(op), lib=LIBRARY)
        torch.library.register_fake(f"{name}_out", _out_fake(op), lib=LIBRARY)


_define()
