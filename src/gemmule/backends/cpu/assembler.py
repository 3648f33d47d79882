"""From LLVM code to object code for one CPU, by LLVM's compiler (llvmlite)."""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import llvmlite.binding as llvm
from llvmlite.binding import ffi

from gemmule.backends.cpu.features import cpu_and_features
from gemmule.core import fork

log = logging.getLogger("gemmule")
_KEPT: list[Any] = []  # code that addresses point to


@functools.cache
def _machine(cpu: str, features: str) -> Any:
    """Return LLVM's target: code that runs wherever it is put, in one piece."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # LLVM's objects are also freed outside of a compilation, by whichever thread lets them go.
    lock = getattr(getattr(ffi.lib, "_lock", None), "_lock", None)
    if lock is not None:
        fork.hold("llvm", lock)
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small"
    )


def object_code(text: str) -> bytes:
    """Return the object file of a module given as text, optimised for the CPU in use."""
    begin = time.perf_counter()
    made: bytes = _machine(*cpu_and_features()).emit_object(_optimised(text))
    log.debug(
        "compiled %d bytes of code in %.0f ms", len(made), 1e3 * (time.perf_counter() - begin)
    )
    return made


def assembly(text: str) -> str:
    """Return what `object_code` would, as text."""
    listing: str = _machine(*cpu_and_features()).emit_assembly(_optimised(text))
    return listing


def _optimised(text: str) -> Any:
    machine = _machine(*cpu_and_features())
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization, options.slp_vectorization = True, False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def placed(content: bytes, name: str) -> int:
    """Return the address of the function `name` of an object file, by LLVM's linker."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(*cpu_and_features()))
    engine.add_object_file(llvm.ObjectFileRef.from_data(content))
    engine.finalize_object()
    _KEPT.append(engine)
    return int(engine.get_function_address(name))
