"""The program that compute-sanitizer watches: a sample of the proofs of a rung's variants.

``python -m gemmule.lab.verify.sanitized ORDINAL RESULTS FOLDER/RUNG VARIANT ...`` writes one JSON
line for each variant to RESULTS.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gemmule.lab.verify.device import verify_rung


def main(arguments: Sequence[str]) -> None:
    """Run the samples and write what was found."""
    ordinal, results, name, *variants = arguments
    folder, _, rung = name.partition("/")
    found = verify_rung(folder, rung, int(ordinal), few=True, only=frozenset(variants))
    lines = "".join(json.dumps(asdict(outcome)) + "\n" for outcome in found)
    Path(results).write_text(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
