"""Tensors of the host in the place of CUDA's, for the fast path: nothing is launched, but noted."""

from __future__ import annotations

import struct
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemmule.core.canonical import DEFAULT, canonical
from gemmule.core.operand import Form
from gemmule.dispatch import torch as torch_calls
from gemmule.dispatch import torch_repeats

SCALES = torch.zeros(64)
CODES = struct.pack("<4Q", 64, SCALES.data_ptr(), 0, 0)  # addresses of a quantised matrix
HOST = -1  # what a tensor of the CPU says its device is


def negated(x: torch.Tensor) -> torch.Tensor:
    """Return a view whose memory holds the numbers with the other sign, lazily negated."""
    return torch._neg_view(x)


class Noted:
    """A run whose launches are noted: (stream, addresses of both operands and the result, work)."""

    def __init__(self, workspace: int = 0) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.workspace, self.alive = workspace, list[bool]()
        self.held: weakref.WeakSet[Any] = weakref.WeakSet()

    def starter(self, ordinal: int) -> Any:
        def start(*given: Any) -> None:
            self.launches.append(given)
            self.alive.append(bool(self.held))

        return start


def put_library(
    monkeypatch: pytest.MonkeyPatch, library: Any, maker: Any = None, path: Any = torch_calls
) -> None:
    """Let the fast path of a module find this library for PyTorch, and make results by `maker`."""
    monkeypatch.setattr(path, "sys", SimpleNamespace(modules={"torch": library}))
    if maker is not None:
        monkeypatch.setattr(torch_calls, "maker", maker)


def install(monkeypatch: pytest.MonkeyPatch, run: Noted) -> None:
    """Let device -1 be the current one, whose allocator is the host's."""
    native = SimpleNamespace(
        _cuda_getDevice=lambda: HOST,
        _cuda_getCurrentRawStream=lambda ordinal: 5,
        _increment_version=torch._C._increment_version,
    )
    names = ("autograd", "Size", "uint8", "float32", "float64", "float16")
    library = SimpleNamespace(_C=native, **{name: getattr(torch, name) for name in names})

    def maker(shape: tuple[int, ...], dtype: Any, ordinal: int) -> Any:
        def made() -> Any:
            tensor = torch.empty(shape, dtype=dtype)
            if dtype is torch.uint8:
                run.held.add(tensor)
            return tensor

        return made

    put_library(monkeypatch, library, maker)
    monkeypatch.setattr(torch_repeats, "packed_addresses", lambda matrix: CODES)
    monkeypatch.setattr(torch_repeats, "ordinal_named", lambda name: {"cuda:0": HOST}.get(name, 1))
    of_devices = torch_repeats.seen

    def seen(operand: Any) -> Any:
        if type(operand) is not torch.Tensor or not operand.is_cpu or operand.is_neg():
            return of_devices(operand)
        return operand.dtype, operand.shape, operand.stride(), HOST

    monkeypatch.setattr(torch_repeats, "seen", seen)


def bound(op: str, a: Form, b: Form, run: Any, **options: Any) -> Any:
    """Return the bound call of operands of these forms."""
    call = canonical(op, a, b, None, DEFAULT)
    return torch_calls.bound_call(run, call, (a, b), HOST, **options)
