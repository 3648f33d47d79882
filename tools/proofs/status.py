"""How the evidence stands against the code: what is proved, what changed since, what is needed.

Nothing here needs a GPU: the digests of cubins, as the pinned NVRTC builds them, are compared with
the records. It is what continuous integration runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemmule.backends.cuda import nvrtc
from gemmule.core.problem import FLOAT4_DTYPE
from gemmule.core.registry import device_rungs
from gemmule.core.rung import DeviceRung
from gemmule.storage import evidence
from gemmule.storage.evidence import Record
from proofs import default_plans, proof_lines, proofs

ENDS = (evidence.WITH_BIAS, evidence.SCALED, *evidence.FINISHED.values())
Name = tuple[str, str, str]  # folder, rung, variant
Keys = Mapping[Name, str]


@dataclass(slots=True)
class Standing:
    """The variants of some rungs, each in one of four lists; and rungs that plans lack.

    current: proved as they are. stale: proved before their machine code or geometry changed.
    missing: never proved, though another variant of their rung was: dtypes added since, mostly.
    unproved: of rungs without any record, and variants that add a bias. Plans choose neither; what
    adds a bias takes another launch then. needed: variants without a record
    that a default plan would choose, with one problem each. outdated: what else was checked on a
    device, of older code, in words.
    """

    current: list[Name] = field(default_factory=list)
    stale: list[Name] = field(default_factory=list)
    missing: list[Name] = field(default_factory=list)
    unproved: list[Name] = field(default_factory=list)
    needed: dict[Name, str] = field(default_factory=dict)
    outdated: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all evidence is of the code as it is, and no rung that plans choose lacks it."""
        return not (self.stale or self.missing or self.needed or self.outdated)

    def to_prove(self) -> dict[tuple[str, str], frozenset[str]]:
        """Return the variants without a current proof, by (folder, rung)."""
        found: dict[tuple[str, str], set[str]] = {}
        for folder, rung, variant in (*self.stale, *self.missing, *self.unproved):
            found.setdefault((folder, rung), set()).add(variant)
        return {rung: frozenset(names) for rung, names in found.items()}

    def lines(self) -> list[str]:
        """Return the standing in words, one line a finding, the summary last."""
        words = [f"stale: {'/'.join(name)} changed since its proof" for name in self.stale]
        words += [f"missing: {'/'.join(name)} was never proved" for name in self.missing]
        words += [
            f"needed: {'/'.join(name)} is unproved, but plans would choose it: {problem}"
            for name, problem in self.needed.items()
        ]
        words += [f"outdated: {line}" for line in self.outdated]
        added = [name for name in self.unproved if name[2].endswith(ENDS)]
        floats = [n for n in self.unproved if n not in added and n[2].startswith(FLOAT4_DTYPE)]
        others = [name for name in self.unproved if name not in added and name not in floats]
        rungs = sorted({f"{name[0]}/{name[1]}" for name in others})
        if rungs:
            words.append(f"unproved, never chosen automatically: {', '.join(rungs)}")
        words += [
            f"unproved, 4-bit floats go to a GPU as 8-bit codes until then: {'/'.join(name)}"
            for name in floats
        ]
        words += [
            f"unproved, a bias, scales or an epilogue take another launch: {'/'.join(name)}"
            for name in added
        ]
        words.append(
            f"{len(self.current)} variants proved as they are, {len(self.stale)} stale, "
            f"{len(self.missing)} missing, {len(self.unproved)} unproved"
        )
        return words


def judge(keys: Keys, records: Iterable[Record]) -> Standing:
    """Sort variants by how their present keys compare with the records."""
    proved: dict[Name, set[str]] = {}
    for record in records:
        proved.setdefault((record.folder, record.rung, record.variant), set()).add(record.key)
    rungs = {name[:2] for name in proved}
    standing = Standing()
    for name, key in keys.items():
        if name in proved:
            (standing.current if key in proved[name] else standing.stale).append(name)
        elif name[:2] in rungs and not _waits(name[2]):
            standing.missing.append(name)
        else:
            standing.unproved.append(name)
    return standing


def _waits(variant: str) -> bool:
    """Tell whether plans meet a variant only once it is proved.

    4-bit floats go to a GPU as other codes before (`gemmule.quant.places.reads_floats`).
    """
    return variant.startswith(FLOAT4_DTYPE) or variant.endswith(ENDS)


def take(
    root: Path | None = None,
    rungs: Sequence[DeviceRung] | None = None,
    *,
    workers: int = 2,
    anew: bool = False,
) -> Standing:
    """Compare the cubins of `rungs` (default: all CUDA rungs) with the records.

    Those whose inputs are on record as built (`gemmule.storage.built`) are not built again, unless
    `anew`. ValueError unless NVRTC here is the pinned one. Takes about 0.2 s of one core for each
    kernel that has to be built.
    """
    if not proofs.is_pinned():
        raise ValueError(
            f"proofs are keyed by the cubins of NVRTC {evidence.PINNED_NVRTC}; installed is "
            f"{nvrtc.compiler_version()}. Install nvidia-cuda-nvrtc=={evidence.PINNED_NVRTC}."
        )
    chosen = device_rungs() if rungs is None else tuple(rungs)
    records = list(evidence.read(root))
    keys = proofs.keys(chosen, workers, anew=anew)
    standing = judge(keys, records)
    standing.outdated = proof_lines.out_of_date(proof_lines.under(root), keys)
    proved = {(record.folder, record.rung, record.variant) for record in records}
    wanted = {(rung.folder, rung.name) for rung in chosen}
    standing.needed = {
        name: problem
        for name, problem in default_plans.needed().items()
        if name[:2] in wanted and name not in proved
    }
    return standing
