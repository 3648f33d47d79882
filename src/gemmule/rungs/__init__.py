"""Every kernel of the package; the directory is the registry (see gemmule.rung)."""
