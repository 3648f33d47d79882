"""Models of transformers answer and generate with quantised layers, near what floats answer."""

from __future__ import annotations

import logging

import architectures
import pytest
import torch

from gemmule.torch import QuantLinear, QuantStack, quantize_


@pytest.mark.parametrize("name", architectures.MODELS)
def test_a_model_answers_as_before(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = architectures.build(name)
    before = architectures.logits(model)
    with caplog.at_level(logging.WARNING, "gemmule"):
        report = quantize_(model, bits=8, group_size=32)
    after = architectures.logits(model)
    assert (after - before).norm() < 0.03 * before.norm()
    linear = (torch.nn.Linear, type(None))
    assert not [one for one in model.modules() if type(one) in linear]
    assert report.model is model
    assert set(report.replaced) == {
        path for path, one in model.named_modules() if isinstance(one, QuantLinear | QuantStack)
    }
    assert report.bytes_after < report.bytes_before
    assert not any("less than half" in message for message in caplog.messages)
    if name in architectures.GENERATING:
        given = {k: v for k, v in architectures.inputs(model).items() if "decoder" not in k}
        assert model.generate(**given, max_new_tokens=4, do_sample=False).shape[0] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "whisper"])
def test_halves(name: str, dtype: torch.dtype) -> None:
    """T5 asks the weight for its dtype, and casts what it gives the layer to it."""
    model = architectures.build(name, dtype)
    before = architectures.logits(model)
    quantize_(model, bits=8, group_size=32)
    after = architectures.logits(model)
    assert after.dtype == before.dtype == dtype
    assert (after - before).norm() < 0.05 * before.norm()
    model.float()
    assert architectures.logits(model).dtype == torch.float32
