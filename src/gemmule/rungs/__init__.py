"""Every kernel of the package; the directory is the registry (see gemmule.core.rung)."""
