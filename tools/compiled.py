"""What a kernel of each rung compiles to for each architecture, so that nobody builds it twice.

One compiler makes the same of the same text, name and options. A line of
``tests/compiled/<folder>.<rung>.jsonl`` holds a digest of all these inputs for one architecture,
the cubin's digest, and what ptxas told of the kernel. Where the inputs here have that digest, the
test that no kernel spills judges the line; else it builds. `rebuild` brings the lines up to date.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemmule.backends.cuda import nvrtc
from gemmule.core.architectures import LISTED
from gemmule.core.rung import CudaRung, Signature
from gemmule.storage import lines
from proofs import proofs

SCHEMA = 1
FOLDER = Path(__file__).parents[1] / "tests" / "compiled"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel built for one architecture; inputs, cubin: SHA-256 in hexadecimal.

    shared_bytes: static shared memory as the cubin's sections tell; told_shared_bytes, spill_bytes:
    as ptxas tells.
    """

    arch: str
    inputs: str
    cubin: str
    shared_bytes: int
    told_shared_bytes: int
    spill_bytes: int


@functools.cache
def _signatures(rung: CudaRung) -> tuple[Signature, ...]:
    return tuple(proofs.signatures(rung))


@functools.cache
def _variant(rung: CudaRung, signature: Signature) -> proofs.Variant:
    """Return a variant without its launches, which fill memory."""
    return replace(proofs.variant_of(rung, signature), launches=())


def heaviest(rung: CudaRung, arch: str) -> proofs.Variant:
    """Return a variant of a rung with one of its kernels, others for each architecture.

    Few instances need as many registers as the last ones do, since parameters are declared in
    rising order. The whole matrix: python -m proofs --check --anew.
    """
    of_rung = _signatures(rung)
    turn = len(rung.name) + LISTED.index(arch) - 1
    variant = _variant(rung, of_rung[turn % len(of_rung)])
    heavy = variant.kernels[-2:]
    return replace(variant, kernels=(heavy[turn // len(of_rung) % len(heavy)],))


def build(rung: CudaRung, arch: str) -> Compiled:
    """Compile the rung's `heaviest` kernel for an architecture; LookupError if ptxas omits it."""
    variant = heaviest(rung, arch)
    module, report = nvrtc.build(rung.source_path, variant.kernels, arch, variant.defines)
    (kernel,) = variant.kernels
    found = {one.symbol: one for one in nvrtc.resources(report)}
    return Compiled(
        arch,
        proofs.inputs_digest(variant, arch),
        module.digest(),
        nvrtc.static_shared(module)[kernel],
        found[module.symbols[kernel]].shared_bytes,
        sum(one.spill_bytes for one in found.values()),
    )


def on_record(rung: CudaRung, arch: str, folder: Path = FOLDER) -> Compiled | None:
    """Return the line of these inputs for an architecture, if there is one."""
    wanted = proofs.inputs_digest(heaviest(rung, arch), arch)
    return next((one for one in _read(path_of(rung, folder)) if one.inputs == wanted), None)


def path_of(rung: CudaRung, folder: Path = FOLDER) -> Path:
    """Return the file of a rung."""
    return folder / f"{rung.folder}.{rung.name}.jsonl"


def update(names: Sequence[str], folder: Path = FOLDER) -> Iterator[Path]:
    """Build what is not on record of the named rungs (none: of all); yield the files that changed.

    Files of rungs that are gone are deleted.
    """
    rungs = {path_of(rung, folder): rung for rung in proofs.kernel_rungs(names)}
    for path, rung in rungs.items():
        known = [on_record(rung, arch, folder) for arch in rung.archs]
        if None in known or len(known) != len(list(_read(path))):
            made = [one or build(rung, arch) for one, arch in zip(known, rung.archs, strict=True)]
            lines.write_records(path, SCHEMA, made)
            yield path
    for path in folder.glob("*.jsonl"):
        if not names and path not in rungs:
            path.unlink()
            yield path


def _read(path: Path) -> Iterator[Compiled]:
    """Yield a file's lines; those that are none of ours are passed over."""
    return lines.read_records(path, SCHEMA, Compiled)
