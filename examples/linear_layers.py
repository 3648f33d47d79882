"""A PyTorch model in int4, with gradients of its input and its bias."""

import torch

from gemmule.torch import QuantLinear, quantize_

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512), torch.nn.Tanh()
)
x = torch.randn(4, 512, requires_grad=True)
right = model(x).detach()

report = quantize_(model, bits=4, group_size=64)
print(report)
assert isinstance(model[0], QuantLinear)

y = model(x)
print(f"the output is off by {(y - right).norm() / right.norm():.1%}")
y.square().sum().backward()
assert x.grad.shape == x.shape
assert model[0].bias.grad is not None
