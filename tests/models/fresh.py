"""A fresh process: load each saved model below a folder, and write its logits beside it.

``python fresh.py FOLDER [DEVICE]``: each folder in it is called as its architecture in
`architectures`, up to the first dash, and ``logits.pt`` appears in it, of the CPU or that device.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from architectures import MODELS, logits

import gemmule.torch  # noqa: F401  transformers then knows the layers

device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
for folder in sorted(Path(sys.argv[1]).iterdir()):
    kind, _ = MODELS[folder.name.partition("-")[0]]
    # What a model of 16 bits was saved in, as users load it; float32 else.
    model = kind.from_pretrained(folder, dtype="auto").to(device)
    torch.save(logits(model), folder / "logits.pt")
