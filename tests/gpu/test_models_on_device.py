"""Models on a GPU that are quantised, saved and loaded in a fresh process answer bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
MODELS = Path(__file__).parents[1] / "models"
DEVICE = "cuda:0"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
def test_a_fresh_process_answers_the_same_on_the_device(tmp_path: Path) -> None:
    """From where it was quantised to the file, and from the file to the device, in several files.

    Every second one is quantised on the device itself.
    """
    sys.path.insert(0, str(MODELS))
    import architectures

    from gemmule.torch import quantize_

    wanted = {}
    for i, name in enumerate(architectures.MODELS):
        there = i % 2 == 1
        dtype = torch.float32 if name in architectures.EXPERTS else torch.bfloat16
        model = architectures.build(name, dtype)
        if there:
            model = model.to(DEVICE)
        quantize_(model, bits=4 if i % 3 else 8)
        model = model.to(DEVICE)
        model.save_pretrained(tmp_path / name, max_shard_size="20kB")
        assert (tmp_path / name / "model.safetensors.index.json").exists()
        wanted[name] = architectures.logits(model)
    subprocess.run([sys.executable, MODELS / "fresh.py", tmp_path, DEVICE], check=True)
    found = {name: torch.load(tmp_path / name / "logits.pt") for name in wanted}
    differ = [name for name in wanted if not torch.equal(wanted[name], found[name])]
    assert not differ, differ
    assert len(wanted) >= 12
