"""Checks of quantised layers under FSDP2 and tensor parallelism, by each of two processes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gemmule.torch as gt

WORLD = 2


def rank_of(rank: int, port: int) -> None:
    """Run every check as one process of the mesh."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    products_and_gradients(mesh)
    states(mesh, rank)
    loads_into_a_model_without_memory(mesh)
    mixed_precision(mesh)
    cut_by_plan_is_refused(mesh)
    cut_as_the_error_says(mesh)
    dist.destroy_process_group()


def block(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64, bias=False)
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(64))
    gt.quantize_(model)
    return model


def shared(model: Any, mesh: Any, **options: Any) -> Any:
    """Return the model with each layer, and what is left, shared out."""
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def inputs() -> torch.Tensor:
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


def products_and_gradients(mesh: Any) -> None:
    """The answers are those of one process; so are gradients, of which each has its share."""
    alone, spread, x = block(), shared(block(), mesh), inputs()
    y = spread(x)
    assert torch.equal(y, alone(x))
    (y**3).sum().backward()
    (alone(x) ** 3).sum().backward()
    for (name, mine), theirs in zip(spread.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(mine, DTensor), name
        assert mine.placements == (Shard(0),), name
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)
    torch.optim.SGD(spread.parameters(), lr=0.1).step()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    torch.testing.assert_close(spread(x), alone(x))


def states(mesh: Any, rank: int) -> None:
    """A state_dict shared out or whole, out of a model and into one of other numbers."""
    spread, x = shared(block(), mesh), inputs()
    wanted = spread(x)
    other = shared(block(1), mesh)
    assert not torch.equal(other(x), wanted)
    state = spread.state_dict()
    assert isinstance(state["0.bias"], DTensor)
    assert not isinstance(state["0.codes"], DTensor), "codes are whole on every process"
    other.load_state_dict(state)
    assert torch.equal(other(x), wanted)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(spread, options=whole)
    if rank == 0:
        plain = block(1)
        plain.load_state_dict(state)
        assert torch.equal(plain(x), wanted)
    again = shared(block(2), mesh)
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, state, options=sent)
    assert torch.equal(again(x), wanted)


def loads_into_a_model_without_memory(mesh: Any) -> None:
    source, x = block(), inputs()
    with torch.device("meta"):
        layers = gt.QuantLinear(64, 128), torch.nn.ReLU(), gt.QuantLinear(128, 64, bias=False)
        model = shared(torch.nn.Sequential(*layers, torch.nn.LayerNorm(64)), mesh)
    model.to_empty(device="cpu")
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, source.state_dict(), options=sent)
    assert torch.equal(model(x), source(x))


def mixed_precision(mesh: Any) -> None:
    """Scales are not rounded: x and the bias alone come in the dtype asked for."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    spread, x = shared(block(), mesh, mp_policy=policy), inputs()
    assert spread[0].scales.dtype == torch.float32
    y = spread(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, block().bfloat16()(x.bfloat16()))


def cut_by_plan_is_refused(mesh: Any) -> None:
    for plan in ({"0": ColwiseParallel()}, {"2": RowwiseParallel()}, {"2": ColwiseParallel()}):
        with pytest.raises(TypeError, match=r"Leave it out of the plan.*\.shard\(0, mesh\)"):
            parallelize_module(block(), mesh, plan)
    replicated = distribute_module(block(), mesh)
    placed = distribute_tensor(inputs(), mesh, [Shard(0)])
    for model, x in ((replicated, placed), (replicated, inputs()), (block(), placed)):
        with pytest.raises(TypeError, match="not cut or replicated by parallelize_module"):
            model[0](x)


def cut_as_the_error_says(mesh: Any) -> None:
    """Rows of one layer, columns of the next: between them nothing moves, then one sum."""
    model, x = block(), inputs()
    up, down = model[0].matrix.shard(0, mesh), model[2].matrix.shard(1, mesh)
    hidden = distribute_tensor(x, mesh)
    bias = distribute_tensor(model[0].bias.detach(), mesh, [Shard(0)])
    hidden = (up @ hidden.T).T + bias
    assert hidden.placements == (Shard(1),)
    y = (down @ hidden.relu().T).T.full_tensor()
    torch.testing.assert_close(y, model[:3](x), rtol=1e-5, atol=1e-5)
