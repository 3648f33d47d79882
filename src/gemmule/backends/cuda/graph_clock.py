"""The GPU's clock for `gemmule.timing.sampler`: captured graphs of rotating calls, timed by events.

An entry's calls over all its operand sets are captured once into a graph whose nodes stand in
one chain (plain serial edges: each starts when the one before is done), and replays of that graph
are timed. So neither the host nor launch gaps are in the figure, and with enough operand sets
every call finds the L2 cold.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver
from gemmule.timing.clock import BlockRunner, Entry, Note, Timing

# A graph launch costs the device a few microseconds; with 64 calls or more it is under 2 % of the
# shortest kernels. Graphs of slower kernels stop at a length that makes it under 0.2 %.
LEAST_CALLS = 64
LEAST_GRAPH_S = 4e-3


class GraphClock:
    """Times graph replays on one device, on a stream of its own, whose handle is `stream`."""

    name = "CUDA events around graph replays"

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        api = driver.bindings()
        with driver.on_device(ordinal):
            self._stream = driver.check(
                api.cuStreamCreate(api.CUstream_flags.CU_STREAM_NON_BLOCKING), "making a stream"
            )
            self._events = [driver.check(api.cuEventCreate(0), "making an event") for _ in "ab"]
        self.stream = int(self._stream)
        self.overhead_s = 5e-6

    def now(self) -> float:
        """Return ``time.perf_counter()``."""
        return time.perf_counter()

    def prepare(self, entry: Entry) -> BlockRunner:
        """Warm the entry up, capture its rotation, and return the runner of its replays."""
        api = driver.bindings()
        with (
            self._current(),
            driver.on_device(self.ordinal),
            device_arrays.sharing_workspaces() as kept,
        ):
            entry.call(0)
            entry.call(entry.sets - 1)
            driver.check(api.cuStreamSynchronize(self._stream), f"warming up {entry.name}")
            wanted = min(LEAST_CALLS, math.ceil(LEAST_GRAPH_S / self._single_s(entry)))
            repeats = math.ceil(wanted / entry.sets)
            calls_per_graph = repeats * entry.sets
            graph = self._capture(entry, repeats)

        def run(first: int, calls: int, kept: object = kept) -> Timing:
            replays = math.ceil(calls / calls_per_graph)
            with driver.on_device(self.ordinal):
                before, after = self._events
                driver.check(api.cuEventRecord(before, self._stream), "timing")
                for _ in range(replays):
                    driver.check(api.cuGraphLaunch(graph, self._stream), "replaying a graph")
                driver.check(api.cuEventRecord(after, self._stream), "timing")
                driver.check(api.cuEventSynchronize(after), f"running {entry.name}")
                elapsed_ms = driver.check(api.cuEventElapsedTime(before, after), "timing")
            return Timing(elapsed_ms * 1e-3, replays * calls_per_graph, _notes(self.ordinal))

        weakref.finalize(run, api.cuGraphExecDestroy, graph)
        return run

    def _single_s(self, entry: Entry) -> float:
        """Return roughly what one call takes, launch included."""
        api = driver.bindings()
        before, after = self._events
        driver.check(api.cuEventRecord(before, self._stream), "timing")
        entry.call(0)
        driver.check(api.cuEventRecord(after, self._stream), "timing")
        driver.check(api.cuEventSynchronize(after), f"running {entry.name}")
        elapsed_ms = driver.check(api.cuEventElapsedTime(before, after), "timing")
        return max(float(elapsed_ms), 1e-3) * 1e-3

    def _capture(self, entry: Entry, repeats: int) -> Any:
        api = driver.bindings()
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        driver.check(api.cuStreamBeginCapture(self._stream, mode), "beginning a capture")
        try:
            for _ in range(repeats):
                for index in range(entry.sets):
                    entry.call(index)
        finally:
            result = api.cuStreamEndCapture(self._stream)
        graph = driver.check(result, f"capturing {entry.name}")
        executable = driver.check(api.cuGraphInstantiate(graph, 0), "instantiating a graph")
        api.cuGraphDestroy(graph)
        return executable

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the clock's stream the current one of every imported library."""
        handle = int(self._stream)
        with contextlib.ExitStack() as stack:
            stack.enter_context(device_arrays.using_stream(handle))
            torch = sys.modules.get("torch")
            if torch is not None:
                external = torch.cuda.ExternalStream(handle, device=f"cuda:{self.ordinal}")
                stack.enter_context(torch.cuda.stream(external))
            cupy = sys.modules.get("cupy")
            if cupy is not None:
                stack.enter_context(cupy.cuda.ExternalStream(handle, self.ordinal))
            yield


@functools.cache
def _nvml(ordinal: int) -> tuple[Any, Any] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(ordinal)
    except Exception:  # NVML is an extra; without it blocks carry no notes
        return None


def _notes(ordinal: int) -> dict[str, Note]:
    """Return the SM clock, power and throttle reasons right after a block."""
    found = _nvml(ordinal)
    if found is None:
        return {}
    nvml, handle = found
    try:
        return {
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "watts": round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "throttle": nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        }
    except Exception:
        return {}
