"""What PyTorch's users import: quantised layers, models that are saved and loaded, operators.

Importing it imports neither PyTorch nor transformers; but from then on transformers knows models
that this package quantised, as soon as it is imported.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same as in _MODULES
    from gemmule.torch.calibration import calibrate as calibrate
    from gemmule.torch.checkpoints import load_checkpoint as load_checkpoint
    from gemmule.torch.experts import QuantExperts as QuantExperts
    from gemmule.torch.experts import QuantStack as QuantStack
    from gemmule.torch.files import load_model as load_model
    from gemmule.torch.files import save_model as save_model
    from gemmule.torch.layer import QuantLinear as QuantLinear
    from gemmule.torch.linear import quantize_ as quantize_
    from gemmule.torch.parallel import ColwiseQuant as ColwiseQuant
    from gemmule.torch.parallel import RowwiseQuant as RowwiseQuant
    from gemmule.torch.pretrained import GemmuleConfig as GemmuleConfig
    from gemmule.torch.scaled import scaled_mm as scaled_mm

_MODULES = {
    "ColwiseQuant": "parallel",
    "GemmuleConfig": "pretrained",
    "QuantExperts": "experts",
    "QuantLinear": "layer",
    "QuantStack": "experts",
    "RowwiseQuant": "parallel",
    "calibrate": "calibration",
    "load_checkpoint": "checkpoints",
    "load_model": "files",
    "quantize_": "linear",
    "save_model": "files",
    "scaled_mm": "scaled",
}
_REGISTRY = "transformers.quantizers.auto"


def __getattr__(name: str) -> Any:
    """Import what is asked for from the module that has it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def _register() -> None:
    importlib.import_module(f"{__name__}.pretrained")


class _WhenImported(MetaPathFinder):
    """Registers this package's quantiser as soon as transformers imports its table of them."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """Find the table as Python does, with registering added to its loading."""
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec: ModuleSpec | None = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                _register()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


if _REGISTRY in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _WhenImported())
