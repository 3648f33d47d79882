"""Errors and warnings of the package.

Wrong shapes and strides raise the built-in ``ValueError``, wrong dtypes and kinds ``TypeError``;
what the device or the toolchain did wrong raises one of the classes below. Every message says what
was given, what is required and what to do.
"""

from __future__ import annotations

INSTALL = {  # what installs the optional dependencies, right from a clone too; those of pyproject
    "cuda13": (
        "pip install 'cuda-core>=1.2,<2' 'cuda-bindings==13.*' 'cuda-toolkit[nvrtc,cudart]==13.*'"
    ),
    "lab": "pip install 'rich>=13.9' 'click>=8.1' 'jinja2>=3.1' 'matplotlib>=3.9'",
    "io": "pip install 'scipy>=1.14'",
    "gguf": "pip install 'gguf>=0.17'",
    "serve": "pip install 'torch>=2.6' 'transformers>=5.20' 'accelerate>=1.10'",
}


class DeviceError(RuntimeError):
    """The GPU, its driver or its memory refused: absent, too old, out of memory, or faulted.

    ``restart`` is True when the CUDA context is lost (an illegal address, say): every later CUDA
    call of this process fails too, so the process has to be started again.

    >>> try:
    ...     raise DeviceError("no GPU was found; run `gemmule doctor`")
    ... except DeviceError as error:
    ...     print(error.restart, error)
    False no GPU was found; run `gemmule doctor`
    """

    def __init__(self, message: str, *, restart: bool = False) -> None:
        super().__init__(message)
        self.restart = restart


class PeerError(DeviceError):
    """Another GPU, or the process that drives it, did not deliver what this one waits for.

    ``rank`` is who did not, of the process group. With ``restart`` products among these ranks are
    over, and the processes have to be started again.
    """

    def __init__(self, message: str, *, rank: int, restart: bool = False) -> None:
        super().__init__(message, restart=restart)
        self.rank = rank


class CompileError(RuntimeError):
    """A kernel did not compile; ``log`` holds the compiler's own words.

    >>> CompileError("kernel f of f.cu", log="f.cu(3): error").log
    'f.cu(3): error'
    """

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class GemmuleWarning(UserWarning):
    """Something works, but not as well as it could (a cache that cannot be written, say).

    To make it an error, as a server may want at its start:

    >>> import warnings
    >>> warnings.simplefilter("error", GemmuleWarning)
    """
