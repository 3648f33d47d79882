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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
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
    cut_by_our_styles(mesh, rank)
    cut_unevenly_and_with_other_layouts(mesh, rank)
    cut_where_it_cannot_be(mesh)
    dist.destroy_process_group()


def block(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64, bias=False)
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(64))
    gt.quantize_(model)
    return model


def mlp(inner: int, middle: int, out: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(inner, middle), torch.nn.ReLU(), torch.nn.Linear(middle, out)
    model = torch.nn.Sequential(*layers)
    gt.quantize_(model, group_size=32 if middle == 192 else 64)
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
        with pytest.raises(TypeError, match=r"gemmule\.torch\.ColwiseQuant\(\) or RowwiseQuant"):
            parallelize_module(block(), mesh, plan)
    replicated = distribute_module(block(), mesh)
    placed = distribute_tensor(inputs(), mesh, [Shard(0)])
    for model, x in ((replicated, placed), (replicated, inputs()), (block(), placed)):
        with pytest.raises(TypeError, match="not cut or replicated by PyTorch's own"):
            model[0](x)


def cut_by_our_styles(mesh: Any, rank: int) -> None:
    """Answers, and gradients of inputs and biases, are those of the whole model."""
    for widths in ((64, 128, 64), (64, 192, 70)):
        alone, spread = mlp(*widths), mlp(*widths)
        plan = {"0": gt.ColwiseQuant(), "2": gt.RowwiseQuant()}
        assert parallelize_module(spread, mesh, plan) is spread
        half = widths[1] // WORLD
        assert (spread[0].out_features, spread[2].in_features) == (half, half)
        assert spread[0].codes.numel() + spread[2].codes.numel() == half * (64 + widths[2]) // 2
        x, other = (inputs().requires_grad_() for _ in range(2))
        y = spread(x)
        torch.testing.assert_close(y, alone(other), rtol=1e-5, atol=1e-5)
        (y**3).sum().backward()
        (alone(other) ** 3).sum().backward()
        torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-4)
        mine = alone[0].bias.grad[half * rank : half * (rank + 1)]
        torch.testing.assert_close(spread[0].bias.grad, mine, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(spread[2].bias.grad, alone[2].bias.grad, rtol=1e-4, atol=1e-4)
        again = parallelize_module(mlp(*widths, seed=1), mesh, plan)
        again.load_state_dict(spread.state_dict())
        assert torch.equal(again(x), y)


def cut_unevenly_and_with_other_layouts(mesh: Any, rank: int) -> None:
    """Rows that do not part evenly; results gathered; sequences that are cut; DTensors."""
    x = inputs()
    alone = mlp(64, 129, 64)
    up = parallelize_module(mlp(64, 129, 64)[0], mesh, gt.ColwiseQuant(output_layouts=Replicate()))
    torch.testing.assert_close(up(x), alone[0](x))
    cut, whole = mlp(128, 64, 64)[0], mlp(128, 64, 64)[0]
    style = gt.RowwiseQuant(
        input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False
    )
    down = parallelize_module(cut, mesh, style)
    long = torch.cat([inputs(), inputs().flip(0)], 1)
    y = down(long)
    assert isinstance(y, DTensor)
    assert y.placements == (Shard(0),)
    torch.testing.assert_close(y.full_tensor(), whole(long), rtol=1e-5, atol=1e-5)
    y.sum().backward()
    wanted = torch.full((64,), 3.0)
    torch.testing.assert_close(down.bias.grad, wanted, msg="of every process's rows")


def cut_where_it_cannot_be(mesh: Any) -> None:
    style = gt.RowwiseQuant()
    with pytest.raises(ValueError, match=r"100 inputs on 2 processes are 50 each.*groups of 64"):
        parallelize_module(mlp(100, 8, 8)[0], mesh, style)
    layer = gt.QuantLinear(64, 8, group_size=32)
    layer.perm = torch.arange(63, -1, -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="columns are permuted"):
        parallelize_module(layer, mesh, style)
    for given in (parallelize_module(mlp(64, 8, 8)[0], mesh, gt.ColwiseQuant()), torch.nn.ReLU()):
        with pytest.raises(TypeError, match="ColwiseQuant cuts a whole QuantLinear"):
            parallelize_module(given, mesh, gt.ColwiseQuant())
