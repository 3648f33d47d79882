"""The shape of the source: import direction, sizes, docstrings, and calls that are never made."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkout import SOURCE
from layers import LAYERS

PACKAGE, LAB = SOURCE / "gemmule", SOURCE / "gemmule_lab"


# Imports inside functions that go against the direction: (module, imported) -> why it has to be.
LATE: dict[tuple[str, str], str] = {}
LONGEST_FUNCTION = 60
# "path:function" -> why it may be longer.
LONG_FUNCTIONS: dict[str, str] = {}
FORBIDDEN_NAMES = {"eval", "exec", "__import__"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
ALLOWED_MODULES: dict[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Import:
    """One import of this package's own modules. `late`: inside a function."""

    module: str
    target: str
    late: bool


def module_name(path: Path) -> str:
    """Return the dotted name inside the package: ``problem``, ``__init__``; ``lab.cli``."""
    package, *parts = path.relative_to(SOURCE).with_suffix("").parts
    if package == LAB.name:
        parts.insert(0, "lab")
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def inside(dotted: str) -> str | None:
    """Return a module of the two packages as `module_name` does, None for others' modules."""
    package, _, rest = dotted.partition(".")
    if package == LAB.name:
        return f"lab.{rest}".rstrip(".")
    return rest or "__init__" if package == PACKAGE.name else None


def room(name: str) -> str:
    """Return the layer entry a module belongs to: its folder, or itself."""
    return name.split(".")[0]


def layer(name: str) -> int:
    for index, names in enumerate(LAYERS):
        if room(name) in names:
            return index
    raise AssertionError(f"{name} has no layer: add it to LAYERS where it belongs")


def imports_of(name: str, tree: ast.AST, modules: set[str]) -> Iterator[Import]:
    """Yield the package's own imports, at any depth, those for type checkers too."""

    def walk(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            deeper = late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for target in _targets(child, modules):
                yield Import(name, target, late)
            yield from walk(child, deeper)

    return walk(tree, False)


def _targets(node: ast.AST, modules: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name for alias in node.names if (name := inside(alias.name)))
    elif isinstance(node, ast.ImportFrom) and (base := inside(node.module or "")):
        for alias in node.names:
            full = alias.name if base == "__init__" else f"{base}.{alias.name}"
            yield full if full in modules else base


def faults_of(found: Import) -> str:
    """Return what is wrong with an import, or an empty string."""
    if room(found.module) == room(found.target):
        sides = {name.split(".")[1] for name in (found.module, found.target) if "." in name}
        if room(found.module) == "backends" and sides == {"cpu", "cuda"}:
            return f"{found.module} imports its sibling {found.target}"
        return ""
    if layer(found.target) < layer(found.module):
        return ""
    if found.late and any(
        found.module == module and (found.target + ".").startswith(target + ".")
        for module, target in LATE
    ):
        return ""
    kind = "late" if found.late else "top-level"
    return f"{found.module} imports {found.target} against the direction ({kind})"


SOURCES = {path: ast.parse(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
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
    assert faults_of(Import("backends.cpu.launch", "backends.cuda", True))
    assert faults_of(Import("backends.cuda.arrays", "backends.cpu.jit", False))
    assert not faults_of(Import("backends.cuda.launch", "backends.cuda.arrays", False))


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("core.problem", "from gemmule.storage.tuned import lookup"),
        ("plan", "from gemmule_lab.records.results import read"),
        ("tuning.tuner", "import gemmule.plan"),
        ("oracle.judge", "def f():\n    from gemmule import plan"),
        ("timing.sampler", "from gemmule import api"),
        ("quant.layouts", "from gemmule import matvec"),
        ("core.choice", "if TYPE_CHECKING:\n    from gemmule.plan import Plan"),
    ],
)
def test_imports_against_the_direction_are_seen(module: str, code: str) -> None:
    found = list(imports_of(module, ast.parse(code), MODULES))
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
    assert used == set(LATE), "an entry of LATE is no longer needed"


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reach: dict[str, set[str]] = {}
    for start in arrows:
        seen, todo = set(), [start]
        while todo:
            for target in arrows.get(todo.pop(), set()) - seen:
                seen.add(target)
                todo.append(target)
        reach[start] = seen
    groups = {
        tuple(sorted({a} | {b for b in reach[a] if a in reach.get(b, set())}))
        for a in arrows
        if a in reach[a]
    }
    return [list(group) for group in sorted(groups)]


def test_no_circle_of_imports() -> None:
    """Late imports and those for type checkers count; those named in LATE may close one."""
    arrows: dict[str, set[str]] = {}
    for path, tree in SOURCES.items():
        name = module_name(path)
        targets = {
            found.target
            for found in imports_of(name, tree, MODULES)
            if not (found.late and any(name == m and room(found.target) == t for m, t in LATE))
        }
        arrows[name] = targets - {name, "__init__"}
    assert circles(arrows) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


# (module, function of another one that it calls when it is imported) -> why it has to.
HANDED: dict[tuple[str, str], str] = {
    (
        "api",
        "multiply_by",
    ): "the operators of this package's own matrices, which lie below products",
    ("backends.cpu.pool", "fork.hold"): "a fork waits for the lock",
    ("outofcore.buffers", "driver.when_short"): "kept memory is given back where a device has none",
    ("frameworks.autograd", "register"): "PyTorch asks for derivatives by operators' names",
    ("frameworks.autograd", "register_out"): "the same",
    ("frameworks.scaled", "define"): "PyTorch keeps one set of operators for the package",
    ("torch.quantized_linear", "define"): "the same",
    ("torch.quantized_linear", "register"): "derivatives, of layers",
    ("torch.quantized_grouped", "define"): "an operator of the same set",
    ("torch.quantized_grouped", "register"): "derivatives, of experts",
    ("torch.quantized_grouped", "grouped.register_of_stack"): "the same",
}


def handed(tree: ast.Module) -> Iterator[str]:
    """Yield what a module puts into others of the package, or calls of them, when imported."""
    own = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and inside(node.module or "")
        for alias in node.names
    }
    loops = [node for node in tree.body if isinstance(node, ast.For | ast.If)]
    for node in [*tree.body, *(deeper for loop in loops for deeper in loop.body)]:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                name = ast.unparse(target)
                if not isinstance(target, ast.Name) and name.split(".")[0].split("[")[0] in own:
                    yield name
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func)
            if name.split(".")[0] in own:
                yield name


def test_nothing_is_put_into_another_module_at_import() -> None:
    found = {(module_name(path), name) for path, tree in SOURCES.items() for name in handed(tree)}
    assert found == set(HANDED)
    for code in (
        "lower.product = 1",
        "lower.made[0] = f",
        "lower.take(f)",
        "for f in g: lower.h(f)",
    ):
        assert list(handed(ast.parse(f"from gemmule import lower\n{code}"))), code


# How many other rooms a room may import from: who knows many can rarely be changed alone.
WIDEST = 7
WIDE = {
    "routed": (8, "few rows go to the rung that finds them, which is chosen beside the usual one"),
    "api": (13, "it is the door to all of them"),
    "frameworks": (9, "operators of every kind of product"),
    "lookup": (10, "it finds the products of every kind of operands"),
    "lab": (17, "it measures and verifies all of them"),
    "outofcore": (9, "it plans, feeds and multiplies pieces by itself"),
    "torch": (11, "layers, operators, scaled_mm and several GPUs"),
    "tuning": (14, "it runs whole products, judged and timed"),
}


def test_a_room_knows_few_others() -> None:
    known: dict[str, set[str]] = {}
    for path, tree in SOURCES.items():
        for found in imports_of(module_name(path), tree, MODULES):
            known.setdefault(room(found.module), set()).add(room(found.target))
    for name, others in known.items():
        others.discard(name)
        most, why = WIDE.get(name, (WIDEST, ""))
        told = (
            f"{name} imports from {len(others)} rooms, at most {most}: {', '.join(sorted(others))}"
        )
        assert len(others) <= most, told
        assert not why or len(others) > WIDEST, f"{name} needs no exemption any more"


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body, its docstring left out."""
    body = node.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:] or body
    return (node.end_lineno or 0) - body[0].lineno + 1


def test_functions_are_short() -> None:
    faults = []
    for path, tree in SOURCES.items():
        name = str(path.relative_to(SOURCE))
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
        name = path.relative_to(SOURCE).as_posix()
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


def narrow_cleanups(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of handlers that tidy up and raise again, but for errors alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if again and ast.unparse(node.type) == "Exception":
                yield node.lineno


def test_what_ends_a_call_is_tidied_up_behind() -> None:
    """Also behind Ctrl-C, which is no `Exception`."""
    assert [(str(path), *narrow_cleanups(tree)) for path, tree in SOURCES.items()] == [
        (str(path),) for path in SOURCES
    ]
    code = "try:\n    f()\nexcept Exception:\n    close()\n    raise\n"
    assert list(narrow_cleanups(ast.parse(code))) == [3]
    assert not list(narrow_cleanups(ast.parse(code.replace("Exception", "BaseException"))))


# What takes a device's number or a stream's handle: those of the operands, never one that is named.
BY_DEVICE = (
    *("copy", "on_device", "synchronize", "wait", "allocate", "free", "device_info", "take_lane"),
    *("_cuda_getCurrentRawStream", "current_stream", "Stream", "Event", "enter", "is_capturing"),
)
# Memory that nobody else knows is filled, and read, on the default stream.
NAMED_DEVICES = {"backends/cuda/device_array.py": 1, "tuning/operands.py": 4}


def named_devices(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that name a device or a stream by its number."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            given = [one.value for one in node.args if isinstance(one, ast.Constant)]
            number = called in BY_DEVICE and any(type(one) is int for one in given)
            if number or any(re.match(r"cuda:\d", one) for one in given if type(one) is str):
                yield node.lineno


def test_work_is_for_the_device_and_the_stream_of_its_operands() -> None:
    found = {
        path.relative_to(SOURCE / "gemmule").as_posix(): len(lines)
        for path, tree in SOURCES.items()
        if path.is_relative_to(SOURCE / "gemmule") and (lines := list(named_devices(tree)))
    }
    assert found == NAMED_DEVICES
    for code in ("driver.copy(a, b, n, self.ordinal, 0)", "driver.on_device(0)", "f('cuda:0')"):
        assert list(named_devices(ast.parse(code))), code
