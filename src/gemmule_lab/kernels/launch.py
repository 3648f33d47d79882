"""The lab's own kernels: compiled beside the rungs', launched with one packed struct."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gemmule.backends.cuda import driver, nvrtc, single, tensor_maps
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
        symbol = self._module.symbols[name]
        handle = driver.load(self._module.cubin, symbol, self.ordinal, smem)
        start = single.starter(handle, step)
        slot = tensor_maps.Slot(arguments)

        def launch(stream: int) -> None:
            start(slot.address, stream)

        return launch

    def run(
        self, name: str, arguments: bytes, *, blocks: int, threads: int = 256, smem: int = 0
    ) -> None:
        """Launch a kernel on the default stream and wait for it."""
        launch = self.bind(name, arguments, blocks=blocks, threads=threads, smem=smem)
        with driver.on_device(self.ordinal):
            launch(0)
        driver.synchronize(self.ordinal)
