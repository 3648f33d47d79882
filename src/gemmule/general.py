"""The general path of a product: operands are unwrapped, checked and planned, and the plan runs.

It multiplies without asking whether PyTorch or JAX has to know of the product: their own operators
come back here with what they were given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gemmule.arrays.interop import unwrap_all
from gemmule.core.canonical import NAMES, Options
from gemmule.core.operand import Operand, deciding
from gemmule.plan import resolve
from gemmule.settings import default_device


def product(op: str, a: Any, b: Any, out: Any, options: Options, device: str | None = None) -> Any:
    """Return the product by the general path; PyTorch learns nothing of it, gradients end here."""
    if compiled():
        return untraced(_product, op, a, b, out, options, device)
    return _product(op, a, b, out, options, device)


def _product(op: str, a: Any, b: Any, out: Any, options: Options, device: str | None) -> Any:
    left, right, result = unwrap_all(a, b, NAMES[op], out)
    away = device_of(left, right, device)
    if away is not None:
        from gemmule.outofcore.through import through_device

        return through_device(op, (left, right), result, away, options)
    form = None if result is None else result.form
    where = deciding(left, right).device
    return resolve(op, left.form, right.form, form, where, options).execute(left, right, result)


def untraced(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function where torch.compile does not look at what it does.

    It follows NumPy's arrays as well, but not what is written to their memory behind its back: a
    product was whatever its memory had held before. So products keep it out, below what its graphs
    hold; a graph ends before them.
    """
    if not compiled():
        return function(*arguments)
    reason = "gemmule computes here; an operator or a QuantLinear stays in the graph"
    return sys.modules["torch"].compiler.disable(function, reason=reason)(*arguments)


def compiled() -> bool:
    """Whether torch.compile traces what runs here, or would trace what is called from here."""
    if "torch._dynamo" not in sys.modules:
        return False
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling():
        return True
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def leaves_host() -> bool:
    """Whether the user's environment sends products of host operands to a GPU."""
    return default_device() not in (None, "cpu")


def device_of(left: Operand, right: Operand, device: str | None) -> str | None:
    """Return the GPU that host operands were asked to be multiplied on, None for where they lie.

    ValueError where operands on a device were asked to go to another.
    """
    on_host = left.device == "cpu" == right.device
    wanted = default_device() if device is None and on_host else device
    if wanted is not None and wanted != "cpu" and on_host:
        if left.form.ready is not None or right.form.ready is not None:
            raise ValueError(
                f"a matrix prepared on the host was to be multiplied on {wanted}, but what is "
                f"prepared stays where it is. Prepare gemmule.asarray(B, device={wanted!r}), or "
                "give the array."
            )
        return wanted
    if device is not None and device not in (left.device, left.device.partition(":")[0]):
        raise ValueError(
            f"device is {device!r}, but the operands lie on {left.device}. Leave device= away: a "
            "product is computed where its operands are."
        )
    return None
