"""The direction of imports: the layers of the library and of the lab, from the lowest."""

from __future__ import annotations

# A module imports from layers above its own line and from its own room, never from below.
LAYERS = (
    ("errors", "settings"),
    ("core",),
    ("storage", "timing"),
    ("backends",),
    ("choose", "quant"),
    ("arrays",),
    ("rungs", "oracle"),
    ("dispatch", "tuning"),
    ("plan",),
    ("outofcore", "sharded", "grouped", "scaled"),
    ("general", "typing", "routed", "finished"),
    ("frameworks",),
    ("lookup", "options"),
    ("api",),
    ("__init__", "torch"),
    ("lab",),
    ("__main__",),
)
