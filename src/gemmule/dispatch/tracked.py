"""Whether PyTorch must see a product, for gradients, tracing, `torch.vmap` or autocast."""

from __future__ import annotations

from typing import Any

import torch

# Bound once: `wanted` is asked in every call of tensors.
_Tensor, _is_compiling = torch.Tensor, torch.compiler.is_compiling
_any_autocast = torch._C._is_any_autocast_enabled
_transform = torch._C._functorch.peek_interpreter_stack
_dual = torch.autograd.forward_ad
_scripted, _mode = torch._C._get_tracing_state, torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # the mode by which make_fx records


def wanted(a: Any, b: Any) -> bool:
    """Whether a product of these goes through the operators: PyTorch has to know of it.

    So it is where a gradient will be asked for, under tracing, `torch.vmap` and autocast, and for
    kinds of tensor that handle operators themselves.
    """
    if handled():
        return isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)
    return differentiated(a, b)


def handled() -> bool:
    """Whether PyTorch has to know of every product of tensors now, whoever wants gradients."""
    return bool(_is_compiling() or _any_autocast() or transformed() or recorded())


def differentiated(a: Any, b: Any) -> bool:
    """Whether a gradient will be asked for, or a kind of tensor handles operators itself."""
    if type(a) is _Tensor and type(b) is _Tensor:  # 1 us less than the general question
        return bool((a.requires_grad or b.requires_grad) and torch.is_grad_enabled())
    grad = torch.is_grad_enabled()
    for tensor in (a, b):
        if isinstance(tensor, torch.Tensor) and (
            (grad and tensor.requires_grad) or dispatches(type(tensor))
        ):
            return True
    return False


def transformed() -> bool:
    """Whether `torch.func` or forward differentiation is at work."""
    return _transform() is not None or _dual._current_level >= 0


def recorded() -> bool:
    """Whether torch.jit.trace or make_fx notes what is called, of tensors like all others."""
    return _scripted() is not None or _mode(_PROXY) is not None


def dispatches(kind: Any) -> bool:
    """Whether a kind of tensor handles operators itself."""
    plain = kind is torch.Tensor or kind is torch.nn.Parameter
    return not plain and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def refuse_plan(a: Any, b: Any) -> None:
    """Raise ValueError where PyTorch would have to know of a planned product."""
    if wanted(a, b):
        raise _unseen("a plan")


def refuse_blas(name: str, tensors: tuple[Any, ...]) -> None:
    """Raise ValueError where PyTorch would have to know of `gemv` or `gemm`."""
    given = [one for one in tensors if isinstance(one, torch.Tensor)]
    if _is_compiling() or not given:
        return
    if transformed() or recorded() or any(differentiated(one, one) for one in given):
        raise _unseen(name)


def _unseen(what: str) -> ValueError:
    """Return the error for a product that PyTorch would have to know of, and does not."""
    return ValueError(
        f"{what} computes without PyTorch's knowledge, but a tensor requires a gradient, is "
        "traced, or lies under torch.vmap or autocast. Call gemmule.matvec (vecmat, matmul) "
        "there, or do this under torch.no_grad()."
    )
