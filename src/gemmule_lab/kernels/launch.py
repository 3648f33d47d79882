"""The lab's own kernels: compiled beside the rungs', launched with one packed struct."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gemmule.backends.cuda import driver, nvrtc, starter
from gemmule.core.rung import Step

FOLDER = Path(__file__).parent


class Kernels:
    """Some kernels of one .cu file of the lab on one device."""

    def __init__(self, file: str, names: Sequence[str], ordinal: int) -> None:
        self.ordinal = ordinal
        arch = driver.device_info(ordinal).arch
        self._module = nvrtc.compile_file(FOLDER / file, tuple(names), arch)

    def bind(
        self, name: str, arguments: bytes, *, blocks: int, threads: int = 256, smem: int = 0
    ) -> Callable[[int], None]:
        """Return a function of a stream's handle that launches a kernel on packed arguments."""
        step = Step(name, (blocks, 1, 1), (threads, 1, 1), smem)
        ready = starter.loaded(self._module, (step,), arguments, self.ordinal)
        start = starter.whole_starter(ready)
        return lambda stream: start(stream, arguments)

    def run(
        self, name: str, arguments: bytes, *, blocks: int, threads: int = 256, smem: int = 0
    ) -> None:
        """Launch a kernel on the default stream and wait for it."""
        launch = self.bind(name, arguments, blocks=blocks, threads=threads, smem=smem)
        with driver.on_device(self.ordinal):
            launch(0)
        driver.synchronize(self.ordinal)
