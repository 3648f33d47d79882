"""Whose threads share a layer's products on the host: those that PyTorch's own loops run on."""

from __future__ import annotations

import json

import pytest

from children import printed
from gemmule.backends.cpu.threads import usable_processors

pytestmark = pytest.mark.skipif(usable_processors() < 2, reason="needs two processors")

# Which threads did a share of a product of 400, and which a part of PyTorch's own loop. A share
# takes long enough for everyone to come.
SHARES = """
import ctypes, json, os, threading
import numpy as np, torch
from gemmule.backends.cpu import openmp, pool
from gemmule.backends.cpu.atomics import now_ns, write
from gemmule.backends.cpu.intrinsics import call_c
from gemmule.backends.cpu.jit import kernel
from forks import start_fork, status_of

GETTID = ctypes.cast(ctypes.CDLL(None).gettid, ctypes.c_void_p).value

@kernel
def share(number: int, found: int, gettid: int) -> None:
    until = now_ns() + 100_000
    while now_ns() < until:
        pass
    write(found + 8 * number, call_c(gettid, ()) & 0xFFFFFFFF)

shared = pool.in_pool(share, 2)

def team(count=400):
    found = np.zeros(count, np.int64)
    openmp.by_pytorch(torch, shared, count, found.ctypes.data, GETTID)
    assert (found > 0).all()
    return set(found.tolist())

def threads():
    return set(map(int, os.listdir("/proc/self/task")))
"""
WHOSE = """
torch.set_num_threads(2)
before = threads()
torch.zeros(1 << 22).exp_()
theirs = threads() - before
met = set().union(*(team() for _ in range(20)))
torch.set_num_threads(1)
print(json.dumps([
    len(theirs), met == theirs | {os.getpid()}, threads() == before | theirs, len(team())
]))
"""
# Four threads, however few processors there are: what few shares leave of a team has to live on.
FEW = """
torch.set_num_threads(4)
torch.zeros(1 << 22).exp_()
before = threads()
doing = team(2)
print(json.dumps([len(doing) <= 2, threads() == before, len(before) >= 4]))
"""
OTHERS = """
torch.set_num_threads(2)
team()
sizes = []
work = lambda: sizes.extend(len(team(9)) for _ in range(20))
callers = [threading.Thread(target=work) for _ in range(4)]
[one.start() for one in callers]; [one.join() for one in callers]
status = status_of(start_fork(lambda: len(team(40)) > 0))
print(json.dumps([len(sizes), max(sizes) <= 2, status]))
"""


def test_shares_run_on_pytorchs_threads_and_as_many_as_it_may_use() -> None:
    assert json.loads(printed(SHARES + WHOSE).splitlines()[-1]) == [1, True, True, 1]


def test_few_shares_leave_the_other_threads_of_the_team_alive() -> None:
    assert json.loads(printed(SHARES + FEW)) == [True] * 3


def test_other_callers_have_teams_of_their_own_and_a_forked_child_goes_without() -> None:
    assert json.loads(printed(SHARES + OTHERS).splitlines()[-1]) == [80, True, 0]


def test_a_layer_asks_for_them() -> None:
    code = """
import torch
from gemmule.backends.cpu import pool
from gemmule.torch import QuantLinear
torch.set_num_threads(2)
layer = QuantLinear.from_linear(torch.nn.Linear(1024, 1024))
x = torch.randn(64, 1024, requires_grad=True)
layer(x).sum().backward()
print(pool._lent.address != 0, pool._state.address)
"""
    assert printed(code).split() == ["True", "0"]
