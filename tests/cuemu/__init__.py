"""Runs unmodified CUDA C++ kernels on the CPU, one fiber per thread, to test without a GPU.

`build.compile_cu` compiles and launches; what all kernels share is `runtime.cpp`, which `toolchain`
builds once. `cases` tables the primitives, `asan` looks for stray accesses, `device` runs the same
cases on a GPU. What a kernel does wrong comes back as `build.EmulationError`:

- deadlocks, divergent barriers and warps, bad masks, misaligned accesses, faults, endless loops;
- misuse of mbarriers, bulk copies, clusters and wgmma;
- shared memory read before it was written gives NaN, a missing wait gives old data, a lane that
  is absent gives poison, and another `seed` runs threads and blocks in another order.

Not seen: races between threads that happen to run in the right order under every seed tried,
missing memory fences and `fence_async`, anything about time. Needs g++ on x86-64 Linux and the
CUDA headers.
"""
