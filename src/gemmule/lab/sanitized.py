"""The program that compute-sanitizer watches: a sample of the proofs of the rungs it is told.

``python -m gemmule.lab.sanitized ORDINAL RESULTS FOLDER/RUNG ...`` writes one JSON line for each
variant to RESULTS. All rungs run in this one process, so that the tool sees them all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gemmule.lab.verify_cuda import verify_rung


def main(arguments: Sequence[str]) -> None:
    """Run the samples, writing what was found after each rung."""
    ordinal, results, *rungs = arguments
    with Path(results).open("w") as file:
        for name in rungs:
            folder, _, rung = name.partition("/")
            for outcome in verify_rung(folder, rung, int(ordinal), few=True):
                file.write(json.dumps(asdict(outcome)) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
