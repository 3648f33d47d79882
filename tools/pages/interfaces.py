"""The public names: their list for docs/api.md, and the pages of the site with the text of each."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gemmule
import gemmule.torch

FIRST = ("matvec", "vecmat", "matmul", "gemv", "gemm", "quantize", "prepare", "plan", "asarray")
LAST = ("CompileError", "DeviceError", "GemmuleWarning", "__version__")
MODULES = {
    "gemmule": (*FIRST, *(n for n in gemmule.__all__ if n not in FIRST + LAST), *LAST[:-1]),
    "gemmule.torch": tuple(sorted(gemmule.torch._MODULES)),
    "gemmule.torch.ops": ("matvec", "vecmat", "matmul"),
    "gemmule.torch.sharded": ("Exchange", "ShardedMatrix"),
    "gemmule.quant.formats": ("read_layer", "from_gptq", "from_awq", "from_hqq", "from_compressed"),
    "gemmule.quant.gguf": ("read_gguf", "from_gguf"),
}
# Members that serve the package itself; their names are public among its modules.
HIDDEN = ("short_way", "fast_path", "execute", "launch", "address", "form", "kept", "operand")
HEADS = {
    "gemmule": "Products, plans and matrices.",
    "gemmule.torch": "Quantised layers; models that are saved, loaded and read from other tools.",
    "gemmule.torch.ops": "The products as operators of PyTorch: [how](../pytorch.md).",
    "gemmule.torch.sharded": "A matrix over several GPUs: [how](../distributed.md).",
    "gemmule.quant.formats": "Layers that other tools quantised: [which](../quantised.md).",
    "gemmule.quant.gguf": "Matrices in GGUF files.",
}


def table() -> str:
    """Return a Markdown table of every public name: what it is, in its own first words."""
    lines = ["| name | what it is |", "|---|---|"]
    for module, names in MODULES.items():
        for name in names:
            first = _text(module, name).split("\n\n")[0].replace("``", "`").replace("|", "\\|")
            lines.append(f"| `{module}.{name}` | {' '.join(first.split())} |")
    return "\n".join(lines)


def _text(module: str, name: str) -> str:
    """Return a docstring; nothing of PyTorch or transformers is imported for it."""
    if module == "gemmule":
        return inspect.getdoc(getattr(gemmule, name)) or ""
    inside = gemmule.torch._MODULES.get(name) if module == "gemmule.torch" else None
    spec = importlib.util.find_spec(f"{module}.{inside}" if inside else module)
    source = "" if spec is None or spec.origin is None else Path(spec.origin).read_text("utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
    raise LookupError(f"{module} has no {name}; mend MODULES.")


def pages() -> dict[str, str]:
    """Return the staged pages of the interface by name: one a module, Sphinx fills them in."""
    return {module: _page(module, names) for module, names in MODULES.items()}


def _page(module: str, names: tuple[str, ...]) -> str:
    parts = [f"# {module}", HEADS[module]]
    for name in names:
        thing = getattr(importlib.import_module(module), name)
        if inspect.isclass(thing):
            hidden = f"   :exclude-members: {', '.join(HIDDEN)}"
            directive = f".. autoclass:: {module}.{name}()\n   :members:\n{hidden}"
        else:
            directive = f".. autofunction:: {module}.{name}{_called(thing)}"
        parts.append(f"## {name}\n\n```{{eval-rst}}\n{directive}\n```")
    return "\n\n".join(parts) + "\n"


def _called(function: Callable[..., Any]) -> str:
    """Return how a function is called, without types: the text tells them better."""
    signature = inspect.signature(function)
    bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))
