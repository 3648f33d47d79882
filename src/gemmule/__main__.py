"""``python -m gemmule``: the ``gemmule`` command; the package gemmule_lab does its work."""

from __future__ import annotations


def main() -> None:
    """Run the command line and leave the process with its exit code."""
    from gemmule_lab.start import main as begin

    begin()


if __name__ == "__main__":
    main()
