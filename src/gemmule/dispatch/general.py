"""The general way of a product, for those below who come back to it: PyTorch's operators.

`gemmule.lookup` puts it here; it multiplies without asking whether PyTorch has to know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmule.core.canonical import Options

Product = Callable[[str, Any, Any, Any, Options], Any]  # (op, a, b, out, options)

product: Product
