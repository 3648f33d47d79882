"""What every test process does first, and last."""

import fcntl
import gc
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Container, Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from planted import planted

# Most of what tests make lives long: syntax trees, compiled kernels, tables of cases.
gc.set_threshold(100_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def _older_objects_are_no_garbage() -> None:
    """Look for garbage once a file; what survives, millions of objects, is never looked at again.

    PyTorch, JAX and what Numba compiled make a collection cost most of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _each_test_compiles_anew() -> None:
    """Forget what PyTorch compiled before the test, where its compiler is imported.

    PyTorch counts recompilations by code object, and a function of its own around a compiled
    callable is one object for all: after eight it compiles no more, and a test that compiles a
    whole graph fails by what ran before it in its process.
    """
    if (compiler := sys.modules.get("torch._dynamo")) is not None:
        compiler.reset()


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What sets environment variables until the test ends: ``setting(GEMMULE_TUNE="0")``.

    A variable given as None is not set; anything else is set to its text.
    """

    def set_variables(**variables: object) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))

    return set_variables


@pytest.fixture
def fault() -> Iterator[Callable[..., Any]]:
    """What plants a fault until the test ends, and fails where nothing met it: see `planted`."""
    with ExitStack() as stack:
        yield lambda *given: stack.enter_context(planted(*given))


@pytest.fixture
def unwritten() -> Iterator[None]:
    """Arrays of `np.empty` that are not zeros by chance."""
    from unwritten import shown

    with shown():
        yield


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What puts modules in the place of imported ones; None: not installed; ...: not imported."""

    def put(names: Mapping[str, Any] | None = None, **more: Any) -> None:
        for name, module in {**(names or {}), **more}.items():
            if module is ...:
                monkeypatch.delitem(sys.modules, name, raising=False)
            else:
                monkeypatch.setitem(sys.modules, name, module)

    return put


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What gives constants of a module, names in capitals, other values until the test ends.

    Limits that little meets then, or folders of the test's own: ``limit(panels, MOST_BYTES=64)``.
    """

    def set_limits(module: Any, **values: Any) -> None:
        for name, value in values.items():
            assert name.isupper()
            assert isinstance(value, type(getattr(module, name)))
            monkeypatch.setattr(module, name, value)

    return set_limits


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which the test runs: what it names relatively lies there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_cache(tmp_path: Path, setting: Callable[..., None]) -> Iterator[Path]:
    """A cache folder of the test's own, not made yet: nothing is tuned or measured.

    The CPU's compiled kernels stay where they are.
    """
    from gemmule.backends.cpu.jit import unavailable
    from gemmule.core.caches import forget_plans

    if unavailable() is None:
        from gemmule.backends.cpu.jit_cache import kernel_folder

        kernel_folder()
    setting(GEMMULE_CACHE=tmp_path / "cache", GEMMULE_TUNE=None)
    forget_plans()
    yield tmp_path / "cache"
    forget_plans()


@pytest.fixture
def only_rungs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """What makes some rungs the only ones of their back end: ``only_rungs(folder, *rungs)``.

    Each has a file of one line, its name, in the folder, which stands in the place of `rungs`.
    """
    from gemmule.core import registry, rung
    from gemmule.core.caches import forget_plans
    from gemmule.storage import sources

    def make_only(folder: Path, *rungs: rung.Rung) -> None:
        (folder / "matvec" / "cpu").mkdir(parents=True, exist_ok=True)
        for one in rungs:
            (folder / "matvec" / "cpu" / f"{one.name}.py").write_text(f"# {one.name}")
        instead = {
            "all_rungs": lambda backend, folders=("*",): rungs,
            "rungs_for": lambda backend, op, quantized: rungs,
            "RUNGS_FOLDER": folder,
        }
        sound = (registry.all_rungs, registry.rungs_for, rung.RUNGS_FOLDER)
        users = [one for name, one in sys.modules.items() if name.startswith("gemmule")]
        for module, (name, stand_in) in itertools.product(users, instead.items()):
            if getattr(module, name, None) in sound and module is not registry:
                monkeypatch.setattr(module, name, stand_in)
        sources.forget_digests()
        forget_plans()

    yield make_only
    sources.forget_digests()
    forget_plans()


@pytest.fixture
def only_proved(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What says which rungs of a back end are proved: ``only_proved("cpu", {"blas"})``."""
    from gemmule import backends
    from gemmule.core.caches import forget_plans

    def prove(backend: str, names: Container[str]) -> None:
        kind = type(backends.get(backend))
        monkeypatch.setattr(kind, "proved", lambda self, rung, *_: rung.name in names)
        forget_plans()

    return prove


def pytest_sessionfinish() -> None:
    """Spare what still lives pytest's five last collections, each of most of a second."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let one worker import everything first, where no module is compiled to bytecode yet.

    Each of them compiled the same thousands of modules of PyTorch and JAX, for nine seconds.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or _is_compiled("torch"):
        return (yield)
    path = Path(tempfile.gettempdir()) / f"gemmule-imports-{run}"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)  # with the others, once the first is through
        try:
            return (yield)
        finally:
            path.unlink(missing_ok=True)


def _is_compiled(module: str) -> bool:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return True
    return Path(importlib.util.cache_from_source(found.origin)).is_file()
