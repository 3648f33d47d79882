"""`QuantExperts`: the experts of a mixture with quantised projections, in one module.

It stands in for the experts of transformers, whose weights are 3-D parameters, or is made of two
stacks. Where tokens go is known on the device alone; nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch

from gemmule.dispatch.tracked import recorded
from gemmule.frameworks.autograd import autocast
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.places import reads_floats
from gemmule.quant.quantize import quantize
from gemmule.quant.stack import QuantizedStack
from gemmule.torch import quantized_grouped as quantized_grouped  # its import defines it
from gemmule.torch.coded import Coded
from gemmule.torch.parts import PARTS, StackShape, placed, tensor_of
from gemmule.torch.replacing import refuse, take_over
from gemmule.torch.spread import refuse_spread

DOWN, SILU_GATE = "down_proj", "silu_gate"


class Kept(NamedTuple):
    """How experts of transformers keep their weights."""

    first: str  # the name of the first projection's; the second is `DOWN`
    turned: bool  # as (experts, in, out), else (experts, out, in)

    @property
    def names(self) -> tuple[str, str]:
        """The names of both projections."""
        return self.first, DOWN

    def stack_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight as (experts, in, out), in its memory."""
        return weight if self.turned else weight.swapaxes(1, 2)


def how_kept(module: Any) -> Kept | None:
    """Return how a module keeps its experts' weights; None where it is none that is known.

    It is known where transformers' interface of experts says how such a module computes.
    """
    own = vars(module) if isinstance(module, torch.nn.Module) else {}
    if not {"num_experts", "has_gate", "has_bias", "is_transposed"} <= own.keys():
        return None
    found = Kept("gate_up_proj" if own["has_gate"] else "up_proj", bool(own["is_transposed"]))
    weights = [own["_parameters"].get(name) for name in found.names]
    known = all(
        weight is not None and weight.ndim == 3 and len(weight) == own["num_experts"]
        for weight in weights
    )
    return found if known else None


def is_experts(module: Any) -> bool:
    """Tell whether a module is one of those that `QuantExperts` stands in for."""
    return how_kept(module) is not None


class QuantStack(Coded):
    """A `QuantizedStack` as a module: the matrices of one projection of all experts.

    ``forward`` is `gemmule.grouped_matmul`, by offsets or by indices, differentiable in x and in
    weights; rows behind the last end are zeros. Its buffers are the stack's parts, in layout
    ``row`` everywhere. All else is as `QuantLinear` has it: ``.to(dtype)``, state_dicts, bits that
    are checked.

    >>> stack = QuantStack.from_weight(torch.randn(3, 64, 32), bits=4)
    >>> stack(torch.ones(2, 64), torch.tensor([0, 1, 2], dtype=torch.int32)).shape
    torch.Size([2, 32])
    """

    experts: int
    in_features: int
    out_features: int

    def __init__(self, stack: QuantizedStack) -> None:
        held = stack.matrix
        parts = (tensor_of(getattr(held, part)) for part in PARTS)
        self._made(stack.shape, held.bits, held.group_size, *parts)

    def _made(
        self, shape: tuple[int, int, int], bits: int, group_size: int | None, *parts: Any
    ) -> None:
        torch.nn.Module.__init__(self)
        self.experts, self.in_features, self.out_features = shape
        self.bits, self.group_size = bits, group_size
        self._register(*parts)

    @classmethod
    def from_weight(cls, weight: torch.Tensor, **options: Any) -> Self:
        """Return the stack of a weight (experts, in, out), quantised where it lies."""
        rows, (experts, width, height) = weight.swapaxes(1, 2), weight.shape
        each = not rows.is_contiguous() or options.get("format") is not None
        whole = rows if each else [rows.reshape(experts * height, width)]  # no copy of all
        return cls.from_rows(whole, experts, **options)

    @classmethod
    def from_rows(cls, pieces: Iterable[torch.Tensor], experts: int, **options: Any) -> Self:
        """Return the stack of matrices (out, in) that lie behind each other, piece by piece.

        options: as `gemmule.quantize` has them. Floats are needed of one piece at a time.
        """
        matrices: list[QuantizedMatrix] = []
        for piece in pieces:
            matrix = quantize(piece.detach(), **options)
            matrices.append(QuantizedStack.from_matrix(matrix, 1).matrix)
            dtype = piece.dtype
        first = matrices[0]
        parts = [
            None if getattr(first, part) is None else _joined([getattr(m, part) for m in matrices])
            for part in PARTS
        ]
        rows, width = sum(m.shape[0] for m in matrices), first.shape[1]
        made = cls.__new__(cls)
        made._made((experts, width, rows // experts), first.bits, first.group_size, *parts)
        made.weight_dtype = dtype
        return made

    @classmethod
    def from_tensors(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        perm: None = None,
        *,
        shape: tuple[int, int, int],
        bits: int,
        group_size: int | None,
    ) -> Self:
        """Return a module that holds a stack's parts, checked: none is copied.

        shape: (experts, in, out). TypeError and ValueError as `QuantizedStack.from_matrix` has
        them.
        """
        made = cls.__new__(cls)
        made._made(shape, bits, group_size, codes, scales, zeros, perm)
        made._hold(placed(made._parts, made._shape))
        made.stack  # noqa: B018  what is wrong is said now
        return made

    def _stays_on(self, device: torch.device) -> bool:
        return self.format in (None, "float8") or reads_floats(
            self.format, str(device), experts=True
        )

    @property
    def _shape(self) -> StackShape:
        rows = self.experts * self.out_features
        return StackShape(rows, self.in_features, self.bits, self.group_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, in_features, out_features)."""
        return self.experts, self.in_features, self.out_features

    @property
    def stack(self) -> QuantizedStack:
        """The stack, in this module's memory."""
        return QuantizedStack.from_matrix(self.matrix, self.experts)

    def forward(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor | None = None,
        *,
        indices: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        epilogue: str | None = None,
    ) -> torch.Tensor:
        """Return rows of x each by its expert's matrix, in x's dtype.

        Sorted by expert, with `offsets` and nothing else; or found by `indices`.
        """
        if not (torch.compiler.is_compiling() or recorded()):
            self._hold(placed(self._parts, self._shape))
        refuse_spread(x, self.codes)
        (x,) = autocast(x)
        held = self.codes, self.scales, self.zeros, self.experts, self.in_features
        form = *held, self.bits, self.group_size
        operators = torch.ops.gemmule
        if offsets is not None:
            found = operators.quantized_grouped.default(x, offsets, False, None, *form)
        else:
            found = operators.quantized_routed.default(x, indices, weights, epilogue, *form)
        return found

    def extra_repr(self) -> str:
        """Return what stands between the brackets of the module's repr."""
        return (
            f"experts={self.experts}, in_features={self.in_features}, "
            f"out_features={self.out_features}, {self._codes}"
        )


def _joined(parts: list[Any]) -> Any:
    tensors = [tensor_of(part) for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _gated(module: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    found: torch.Tensor = module.act_fn(gate) * up
    return found


class QuantExperts(torch.nn.Module):  # type: ignore[misc]
    """Experts whose two projections are quantised: what stands in for those of transformers.

    Made of stacks, ``gate_up`` (experts, hidden, 2 width), gates before ups, and ``down`` (experts,
    width, hidden): an expert is then ``(act_fn(x gate) * (x up)) down``. Made by `from_experts` it
    computes as the module that it stands in for: with its activation, the order of gates and ups,
    biases and norms. The projections are `QuantStack`s under the names of the weights,
    ``gate_up_proj`` (``up_proj`` without gates) and ``down_proj``.

    Differentiable in hidden states, routing weights and biases, not in codes and scales. Gradients
    read on the host how tokens were spread.

    >>> import torch, gemmule as gm, gemmule.torch as gt
    >>> gate_up, down = torch.randn(4, 64, 256), torch.randn(4, 128, 64)
    >>> experts = gt.QuantExperts(*(gm.quantize_experts(w, 8, 32) for w in (gate_up, down)))
    >>> experts(torch.ones(3, 64), torch.tensor([[0, 3], [3, 1], [0, 1]]), torch.ones(3, 2)).shape
    torch.Size([3, 64])
    """

    _gate: Callable[[Any, torch.Tensor], torch.Tensor] | None = staticmethod(_gated)

    def __init__(
        self,
        gate_up: QuantizedStack,
        down: QuantizedStack,
        act_fn: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.silu,
    ) -> None:
        super().__init__()
        if gate_up.shape[0] != down.shape[0] or gate_up.shape[2] != 2 * down.shape[1]:
            raise ValueError(
                f"gate_up is {gate_up.shape} and down {down.shape}; both must have as many "
                "experts, and gate_up twice as many columns as down has rows: gates, then ups."
            )
        self.num_experts, self.act_fn = gate_up.shape[0], act_fn
        self._is_expert_parallel = False
        self._names = ("gate_up_proj", DOWN)
        self._epilogue = SILU_GATE if act_fn is torch.nn.functional.silu else None
        self.gate_up_proj, self.down_proj = QuantStack(gate_up), QuantStack(down)

    @classmethod
    def from_experts(cls, experts: torch.nn.Module, **options: Any) -> Self:
        """Return the quantised form of transformers' experts, on their device.

        options: as `gemmule.quantize` has them. Biases, norms and hooks are shared with
        the module, not copied. TypeError for anything else; ValueError for what would be lost.
        """
        how = cls.refuse(experts)
        stacks = {
            name: QuantStack.from_weight(how.stack_of(getattr(experts, name)), **options)
            for name in how.names
        }
        return cls.in_place_of(experts, stacks)

    @classmethod
    def refuse(cls, experts: torch.nn.Module) -> Kept:
        """Return how experts are kept; raise as `from_experts` does."""
        how = how_kept(experts)
        if how is None:
            raise TypeError(
                f"{type(experts).__name__} is not known to hold experts as transformers' "
                "interface of experts has them; make QuantExperts of two stacks"
            )
        refuse(experts, cls, {*how.names, *(f"{name}_bias" for name in how.names)})
        return how

    @classmethod
    def in_place_of(cls, experts: torch.nn.Module, stacks: Mapping[str, QuantStack]) -> Self:
        """Return what stands in for transformers' experts with these projections, by name."""
        how = cls.refuse(experts)
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        take_over(made, experts, how.names)
        made.__dict__.setdefault("_is_expert_parallel", False)  # which earlier versions lack
        gated: Any = getattr(type(experts), "_apply_gate", _gated)
        made.__dict__["_gate"] = gated if made.has_gate else None
        usual = gated is _gated or gated.__name__ == "_default_apply_gate"
        silu = type(made.act_fn).__name__ in ("SiLU", "SiLUActivation") if usual else False
        made._epilogue = SILU_GATE if made.has_gate and silu else None
        made._names = how.names
        for name in how.names:
            made.add_module(name, stacks[name])
        made.train(experts.training)
        return made

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of what a token's experts give, in the tokens' dtype.

        hidden_states (tokens, hidden); top_k_index (tokens, top_k), the experts of each token;
        top_k_weights alike.
        """
        index, (first, last) = top_k_index.contiguous(), self._names
        fused = None if self._biased(first) else self._epilogue
        x = getattr(self, first)(hidden_states, indices=index, epilogue=fused)
        if fused is None:
            x = self._with_bias(first, x, index)
            x = self.act_fn(x) if self._gate is None else self._gate(self, x)
        normed = getattr(self, "has_post_expert_norm", False)
        down, shares = getattr(self, last), top_k_weights.contiguous()
        if not normed and not self._biased(last):
            return down(x, indices=index, weights=shares).to(hidden_states.dtype)
        x = self._with_bias(last, down(x, indices=index), index)
        x = self.post_expert_norm(x) if normed else x
        if self._is_expert_parallel:  # experts of other processes are numbered behind the last
            shares = shares.masked_fill(index >= self.num_experts, 0)
        return (x * shares[..., None]).sum(1).to(hidden_states.dtype)

    def _biased(self, name: str) -> bool:
        return self._parameters.get(f"{name}_bias") is not None

    def _with_bias(self, name: str, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        bias = self._parameters.get(f"{name}_bias")
        if bias is None:
            return x
        if self._is_expert_parallel:
            index = index.clamp(max=self.num_experts - 1)
        return x + bias[index].to(x.dtype)
