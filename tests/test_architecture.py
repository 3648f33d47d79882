"""The shape of the source: import direction, sizes, docstrings, and calls that are never made."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "gemmule"

# A module imports from layers above its own line, and from its own family, never from below.
LAYERS = (
    ("errors", "settings", "clocks"),
    ("problem", "measure"),
    ("quant",),
    ("rung",),
    ("store", "evidence", "oracle", "arrays"),
    ("canonical",),
    ("backends",),
    ("rungs", "hostcall"),
    ("plan",),
    ("tune",),
    ("api",),
    ("__init__", "torch_ops"),
    ("lab",),
    ("__main__",),
)
FAMILIES = ("quant", "oracle", "store", "backends", "rungs", "tune", "lab")

# Imports inside functions that go against the direction: (module, imported) -> why it has to be.
LATE = {
    ("plan", "tune"): "Plan.tune offers what is built on plans",
    ("arrays", "backends.cuda_arrays"): "GPU arrays are unwrapped only where one is met",
    ("backends.cuda_arrays", "plan"): "host operands sent to a device are planned there",
}
LONGEST_MODULE, LONGEST_FUNCTION = 350, 60
# path -> why it may be longer.
LONG_MODULES: dict[str, str] = {
    "gemmule/plan.py": "choosing and the Plan that holds the choice belong together",
    "gemmule/canonical.py": "every way in which a call is seen as one product",
    "gemmule/api.py": "half of it is the public docstrings",
}
# "path:function" -> why it may be longer.
LONG_FUNCTIONS: dict[str, str] = {}
FORBIDDEN_NAMES = {"eval", "exec", "__import__"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
ALLOWED_MODULES = {
    ("backends/jit_cache.py", "pickle"): "Numba's own cache format, from a private folder only",
}


@dataclass(frozen=True)
class Import:
    """One import of this package's own modules. `late`: inside a function."""

    module: str
    target: str
    late: bool


def module_name(path: Path) -> str:
    """Return the dotted name inside the package: ``problem``, ``lab.cli``, ``__init__``."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def family(name: str) -> str:
    """Return the layer entry a module belongs to."""
    top = name.split(".")[0]
    for one in FAMILIES:
        if top == one or top.startswith(one + "_"):
            return one
    return top


def layer(name: str) -> int:
    for index, names in enumerate(LAYERS):
        if family(name) in names:
            return index
    raise AssertionError(f"{name} has no layer: add it to LAYERS where it belongs")


def imports_of(name: str, tree: ast.AST, modules: set[str]) -> Iterator[Import]:
    """Yield the package's own imports, at any depth, those for type checkers left out."""

    def walk(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            deeper = late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for target in _targets(child, modules):
                yield Import(name, target, late)
            yield from walk(child, deeper)

    return walk(tree, False)


def _targets(node: ast.AST, modules: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "gemmule":
                yield alias.name.partition(".")[2] or "__init__"
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gemmule":
        base = (node.module or "").partition(".")[2]
        for alias in node.names:
            full = f"{base}.{alias.name}" if base else alias.name
            yield full if full in modules else base or "__init__"


def faults_of(found: Import) -> str:
    """Return what is wrong with an import, or an empty string."""
    if family(found.module) == family(found.target) != "backends":
        return ""
    sides = {found.module.split(".")[-1].split("_")[0], found.target.split(".")[-1].split("_")[0]}
    if family(found.module) == family(found.target):
        return (
            f"{found.module} imports its sibling {found.target}" if sides == {"cpu", "cuda"} else ""
        )
    if layer(found.target) < layer(found.module):
        return ""
    if found.late and any(
        found.module == module and (found.target + ".").startswith(target + ".")
        for module, target in LATE
    ):
        return ""
    kind = "late" if found.late else "top-level"
    return f"{found.module} imports {found.target} against the direction ({kind})"


SOURCES = {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {module_name(path) for path in SOURCES}


def test_imports_go_one_way() -> None:
    faults = [
        fault
        for path, tree in SOURCES.items()
        for found in imports_of(module_name(path), tree, MODULES)
        if (fault := faults_of(found))
    ]
    assert not faults, "\n".join(faults)


def test_the_back_ends_are_siblings() -> None:
    assert faults_of(Import("backends.cpu", "backends.cuda", True))
    assert faults_of(Import("backends.cuda_arrays", "backends.cpu", False))
    assert not faults_of(Import("backends.cuda", "backends.cuda_arrays", False))


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("problem", "from gemmule.rung import Rung"),
        ("plan", "from gemmule.lab.results import read"),
        ("plan", "import gemmule.tune"),
        ("oracle", "def f():\n    from gemmule import plan"),
        ("measure", "from gemmule import api"),
        ("quant_layouts", "from gemmule import matvec"),
    ],
)
def test_imports_against_the_direction_are_seen(module: str, code: str) -> None:
    found = list(imports_of(module, ast.parse(code), MODULES | {"tune"}))
    assert found
    assert all(faults_of(one) for one in found)


def test_late_imports_are_named_and_used() -> None:
    used = {
        (module, target)
        for path, tree in SOURCES.items()
        for found in imports_of(module_name(path), tree, MODULES)
        for module, target in LATE
        if found.late and found.module == module and (found.target + ".").startswith(target + ".")
    }
    waiting = {("plan", "tune")} if "tune" not in MODULES else set()
    assert used | waiting == set(LATE), "an entry of LATE is no longer needed"


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return a function's lines without its docstring."""
    total = (node.end_lineno or 0) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        total -= (first.end_lineno or 0) - first.lineno + 1
    return total


def test_modules_and_functions_are_short() -> None:
    faults = []
    for path, tree in SOURCES.items():
        name = str(path.relative_to(SOURCE))
        length = len(path.read_text("utf-8").splitlines())
        if length > LONGEST_MODULE and name not in LONG_MODULES:
            faults.append(f"{name} has {length} lines; at most {LONGEST_MODULE}")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{name}:{node.name}"
                if _lines(node) > LONGEST_FUNCTION and where not in LONG_FUNCTIONS:
                    faults.append(f"{where} has {_lines(node)} lines; at most {LONGEST_FUNCTION}")
    assert not faults, "\n".join(faults)


def test_every_module_has_a_docstring_and_future_annotations() -> None:
    faults = []
    for path, tree in SOURCES.items():
        name = str(path.relative_to(SOURCE))
        if tree.body and not ast.get_docstring(tree):
            faults.append(f"{name} has no docstring")
        has_code = any(isinstance(n, ast.FunctionDef | ast.ClassDef) for n in tree.body)
        future = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)
        if has_code and not future:
            faults.append(f"{name} lacks 'from __future__ import annotations'")
    assert not faults, "\n".join(faults)


def dangers(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module or empty, complaint) for what this package never does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            if called in FORBIDDEN_NAMES:
                yield "", f"line {node.lineno}: calls {called}"
            if ast.unparse(node.func) in ("os.system", "os.popen", "subprocess.getoutput"):
                yield "", f"line {node.lineno}: calls {ast.unparse(node.func)}"
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("shell", "allow_pickle") and is_true:
                    yield "", f"line {node.lineno}: {keyword.arg}=True"
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if any(alias.name == "*" for alias in node.names):
                yield "", f"line {node.lineno}: import *"
        for name in names:
            if name.split(".")[0] in FORBIDDEN_MODULES:
                yield name.split(".")[0], f"line {node.lineno}: imports {name}"


def test_nothing_is_unpickled_evaluated_or_run_by_a_shell() -> None:
    faults, used = [], set()
    for path, tree in SOURCES.items():
        name = path.relative_to(PACKAGE).as_posix()
        for module, complaint in dangers(tree):
            if (name, module) in ALLOWED_MODULES:
                used.add((name, module))
            else:
                faults.append(f"{name}, {complaint}")
    assert not faults, "\n".join(faults)
    assert used == set(ALLOWED_MODULES), "an entry of ALLOWED_MODULES is no longer needed"


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "exec('1')",
        "import pickle",
        "from pickle import loads",
        "subprocess.run('ls', shell=True)",
        "os.system('ls')",
        "np.load(f, allow_pickle=True)",
        "from x import *",
        "import yaml",
    ],
)
def test_the_dangers_are_seen(code: str) -> None:
    assert list(dangers(ast.parse(textwrap.dedent(code))))
