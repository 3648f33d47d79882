"""The general way of a product, for those below who come back to it: PyTorch's operators.

`gemmule.lookup` puts it here; it multiplies without asking whether PyTorch has to know.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gemmule.core.canonical import Options

Product = Callable[[str, Any, Any, Any, Options], Any]  # (op, a, b, out, options)

product: Product


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
