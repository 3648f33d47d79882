"""NVIDIA's architectures by name: what a device is compiled for, and whose rungs it takes.

A name is the compiler's: ``sm_90a`` for machine code of one chip with all its instructions,
``compute_80`` for PTX, which the driver turns into the code of any chip that is as new.
"""

from __future__ import annotations

from collections.abc import Collection

# What rungs declare: continuous integration compiles them for these, and no kernel may spill.
LISTED = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
# With copies to shared memory that nobody waits for, bfloat16, and tensor cores' larger tiles.
SINCE_AMPERE = LISTED[1:]
HOPPER = "sm_90a"  # whose warpgroups' products no later chip has
OLDEST = 75

# Most shared memory of a block by compute capability, as NVIDIA's programming guide lists it.
SHARED_BYTES = {
    75: 64 << 10,
    **dict.fromkeys((80, 87), 163 << 10),
    **dict.fromkeys((86, 88, 89, 120, 121), 99 << 10),
    **dict.fromkeys((90, 100, 103, 110), 227 << 10),
}


def number(arch: str) -> int:
    """Return an architecture's compute capability as one number.

    >>> number("sm_90a"), number("compute_121")
    (90, 121)
    """
    return int(arch.partition("_")[2].rstrip("af"))


def is_ptx(arch: str) -> bool:
    """Tell whether kernels are compiled to PTX for it, which the driver translates."""
    return arch.startswith("compute_")


def like(arch: str) -> str:
    """Return the listed architecture whose rungs a device of `arch` takes; empty for none.

    The newest that is not newer: it lacks nothing that those have, but for Hopper's own.

    >>> like("sm_87"), like("sm_103a"), like("sm_121a"), like("compute_90"), like("sm_70")
    ('sm_86', 'sm_100a', 'sm_120a', 'sm_89', '')
    """
    if arch in LISTED:
        return arch
    older = [one for one in LISTED if number(one) <= number(arch) and one != HOPPER]
    return older[-1] if older else ""


def target(capability: int, known: Collection[int]) -> str:
    """Return what to compile for on a device, of a compiler that knows these architectures.

    A chip that it does not know gets PTX of the newest that is not newer; so does one of a compiler
    of which nothing is `known`, by its own name.

    >>> target(75, (75, 90)), target(90, (75, 90)), target(130, (75, 90)), target(87, ())
    ('sm_75', 'sm_90a', 'compute_90', 'sm_87')
    """
    older = [one for one in known if one <= capability]
    if capability not in known and older:
        return f"compute_{max(older)}"
    return f"sm_{capability}{'a' if capability >= 90 else ''}"
