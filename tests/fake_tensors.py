"""PyTorch's tensors without numbers, which it has under a private name alone."""

from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["FakeTensorMode"]
