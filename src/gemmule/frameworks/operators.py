"""The products as operators of PyTorch: kernels, shapes of results, registration of derivatives.

`gemmule.frameworks.autograd` has their derivatives; `gemmule.torch.ops` has the functions to
import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gemmule import general
from gemmule.arrays.interop import check_result
from gemmule.core.canonical import NAMES, Options
from gemmule.core.problem import check_dtype, matmul_shape, matvec_shape, result_dtype

_OPTIONS = 'ScalarType? out_dtype=None, str precision="float32", bool batch_invariant=False'
LIBRARY = torch.library.Library("gemmule", "DEF")
_TRANSFORMED = "FuncTorchDynamicLayerFrontMode"  # asked first while torch.func is at work
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize
_forward_ad = torch.autograd.forward_ad
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset
_DEVICES = (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU)


def refuse_out(op: str, a: Any, b: Any, out: Any) -> None:
    """Raise ValueError where a result written into `out` would lose a gradient."""
    if out is None or not torch.is_grad_enabled():
        return
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in (a, b, out)):
        raise ValueError(
            f"{op} was given out= and a tensor that requires a gradient; a result written into "
            "a given tensor has none. Leave out= away, or call it under torch.no_grad()."
        )


def call(op: str, a: Any, b: Any, *, out: Any = None, **options: Any) -> Any:
    """Call an operator by its name; with `out`, the one that writes there."""
    operators = torch.ops.gemmule
    if out is None:
        return getattr(operators, op).default(a, b, **options)
    getattr(operators, f"{op}_out").default(a, b, out=out, **options)
    return out


# ---- what runs -------------------------------------------------------------------------------
def kernel(op: str) -> Callable[..., Any]:
    """Return what an operator computes on the CPU and on CUDA devices."""

    def run(a: Any, b: Any, **options: Any) -> Any:
        return general.product(op, a, b, None, as_options(options))

    return run


def _out_kernel(op: str) -> Callable[..., None]:
    def run(a: Any, b: Any, *, out: Any, **options: Any) -> None:
        general.product(op, a, b, out, as_options(options))

    return run


def as_options(given: dict[str, Any]) -> Options:
    """Return the options of a product from the keywords of its operator."""
    return Options(
        dtype_name(given.get("out_dtype")),
        given.get("precision", "float32"),
        batch_invariant=given.get("batch_invariant", False),
    )


# ---- what it will look like: shapes and dtypes alone --------------------------------------------
def _result(op: str, a: Any, b: Any, out_dtype: Any) -> tuple[tuple[Any, ...], torch.dtype]:
    """Return shape and dtype of a product; sizes may be symbols. Raises as the product would."""
    _one_device(NAMES[op][0], a, NAMES[op][1], b)
    given = [
        check_dtype(dtype_name(t.dtype), name) for t, name in zip((a, b), NAMES[op], strict=True)
    ]
    dtype = result_dtype(given[0], given[1], dtype_name(out_dtype))
    return _shape(op, a.shape, b.shape), getattr(torch, dtype)


def _one_device(name: str, one: Any, other_name: str, other: Any) -> None:
    if one.device != other.device:
        raise TypeError(
            f"{name} lies on {one.device} and {other_name} on {other.device}; both must lie on one "
            "device. Move one of them first."
        )


def dtype_name(dtype: Any) -> Any:
    """Return the name of one of PyTorch's dtypes, None of None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


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
        _one_device(NAMES[op][0], a, "out", out)
        check_result(tuple(out.shape), dtype_name(out.dtype), shape, dtype_name(dtype))

    return look


# ---- who is asked for derivatives and batches ---------------------------------------------------
# What torch.library registers knows backward gradients alone: an operator that is called by its
# name is refused under torch.func.grad, and under torch.func.jvp its derivative is 0, without a
# word. So an autograd.Function is put where PyTorch asks first under a transformation, and where it
# asks for gradients, of both directions.
def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator, what it computes on every device of the package, and how that looks."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"gemmule::{name}", fake, lib=LIBRARY)


def register(
    op: str,
    kernel: Callable[..., Any],
    apply: Callable[..., Any],
    plainly: Callable[..., Any],
) -> None:
    """Let ``apply(*arguments, **options)`` differentiate an operator of this package's.

    apply: calls an autograd.Function whose ``forward`` calls the operator, and which has ``jvp``
    and ``vmap``. kernel: what the operator computes on the CPU and on CUDA devices. plainly: calls
    that Function `alone`, with the kernel, where nobody but autograd has to know of the product.
    """
    operator = getattr(torch.ops.gemmule, op).default

    def differentiated(keyset: Any, *arguments: Any, **options: Any) -> Any:
        if _has_tangent(op, arguments):
            return apply(*arguments, **options)
        below = keyset & _BELOW_AUTOGRAD
        plain = below.highestPriorityTypeId() in _DEVICES  # to dispatch anew would find the kernel
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return (plainly if plain else apply)(*arguments, **options)
        if plain:
            return kernel(*arguments, **options)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(below, *arguments, **options)

    def transformed(*arguments: Any, **options: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack().key() == _FUNCTIONALIZE:
            return _functionalized(operator, *arguments, **options)
        return apply(*arguments, **options)

    LIBRARY.impl(op, differentiated, "Autograd", with_keyset=True)
    LIBRARY.impl(op, transformed, _TRANSFORMED)


def alone(
    function: type[torch.autograd.Function], compute: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a Function's ``apply`` for where nothing of torch.func is at work; it costs a third.

    PyTorch binds the arguments of one with ``setup_context`` by their names in every call. compute:
    what its ``forward`` does there, without asking PyTorch again.
    """

    def forward(ctx: Any, *given: Any) -> Any:
        found = compute(*given)
        function.setup_context(ctx, given, found)
        return found

    plain = {"forward": forward, "setup_context": torch.autograd.Function.setup_context}
    members = {name: staticmethod(member) for name, member in plain.items()}
    return type(f"{function.__name__}Alone", (function,), members).apply  # type: ignore[attr-defined, no-any-return]


def register_out(op: str) -> None:
    """Refuse derivatives of an operator that writes into a given tensor: they would be lost."""
    operator = getattr(torch.ops.gemmule, op).default
    name = op.removesuffix("_out")

    def differentiated(keyset: Any, a: Any, b: Any, **options: Any) -> None:
        refuse_out(name, a, b, options["out"])
        if _has_tangent(name, (a, b, options["out"])):
            raise ValueError(
                f"{name} was given out= and a dual tensor; a result written into a given tensor "
                "has no derivative. Leave out= away."
            )
        with torch._C._AutoDispatchBelowAutograd():
            operator.redispatch(keyset & _BELOW_AUTOGRAD, a, b, **options)

    def transformed(a: Any, b: Any, **options: Any) -> None:
        raise ValueError(
            f"{name} was given out= under torch.vmap or another transformation of torch.func, "
            "which knows no tensor that is written. Leave out= away."
        )

    LIBRARY.impl(op, differentiated, "Autograd", with_keyset=True)
    LIBRARY.impl(op, transformed, _TRANSFORMED)


def _has_tangent(op: str, arguments: tuple[Any, ...]) -> bool:
    """Whether forward differentiation, outside of torch.func, goes through one of the tensors."""
    if _forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return False
    tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
    if all(_forward_ad.unpack_dual(one).tangent is None for one in tensors):
        return False
    if torch.compiler.is_compiling():  # its graphs do not say that they are at a level
        raise ValueError(
            f"{op} is differentiated forwards by torch.autograd.forward_ad within torch.compile, "
            "where the derivative would be lost. Use torch.func.jvp there, or open the level "
            "outside under torch.no_grad()."
        )
    return True


def _functionalized(operator: Any, *arguments: Any, **options: Any) -> Any:
    """Call an operator, which writes nothing, on what functional tensors hold."""
    from torch._functorch.eager_transforms import (  # private: asked for where they are needed
        _unwrap_all_tensors_from_functional,
        _wrap_all_tensors_to_functional,
    )
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter = retrieve_current_functorch_interpreter()
    with interpreter.lower():
        views = interpreter.functionalize_add_back_views()
        held = _unwrap_all_tensors_from_functional(arguments, reapply_views=views)
        result = operator(*held, **options)
        return _wrap_all_tensors_to_functional(result, level=interpreter.level())


for _op, (_a, _b) in NAMES.items():
    _given = f"Tensor {_a}, Tensor {_b}, *"
    define(f"{_op}({_given}, {_OPTIONS}) -> Tensor", kernel(_op), _fake(_op))
    _written = f"{_op}_out({_given}, Tensor(a!) out, {_OPTIONS}) -> ()"
    define(_written, _out_kernel(_op), _out_fake(_op))
