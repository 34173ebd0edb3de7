"""The inner optimizers, on the flat weights of many replicas, with a learning rate for each training.

Shapes: S trainings, W workers of each, N elements of a worker's parameters; R = S W replicas.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from horizon_model import StackedGPT

BETAS = (0.9, 0.95)
SLOW_BETA = 0.999
EPS = 1e-8
WEIGHT_DECAY = 0.01  # AdamW's default; Muon's default is 0.1, but both optimizers must decay the weights equally
MUON_MOMENTUM = 0.95
MUON_EPS = 1e-7
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Tick(NamedTuple):
    """The scalars of one step, on the device, because a CUDA graph cannot contain numbers that change.

    Attributes:
        rates: the learning rates [S, 1, 1].
        correction1, correction2: 1 - beta^t of the first moment, and the root of 1 - beta^t of the second moment.
        slow_correction: 1 - beta^t of a slow first moment.
    """

    rates: Tensor
    correction1: Tensor
    correction2: Tensor
    slow_correction: Tensor


class InnerOptimizer(Protocol):
    """Steps the weights of all replicas.

    Attributes:
        moments: the state, [S, W, ...] each.
    """

    moments: list[Tensor]

    def step(self, grads_swn: Tensor, tick: Tick) -> None:
        """Update the weights. Contains no synchronization with the host."""


class AdamW:
    """torch.optim.AdamW with its defaults, and betas 0.9 and 0.95, on the weights from column `start` on."""

    def __init__(self, weights_swn: Tensor, model: StackedGPT, start: int = 0) -> None:
        self._start = start
        self._weights = weights_swn[..., start:]
        self._first = torch.zeros_like(self._weights, memory_format=torch.contiguous_format)
        self._second = torch.zeros_like(self._first)
        self.moments = [self._first, self._second]

    def step(self, grads_swn: Tensor, tick: Tick) -> None:
        grads = grads_swn[..., self._start :]
        self._weights.mul_(1 - tick.rates * WEIGHT_DECAY)
        self._first.lerp_(grads, 1 - BETAS[0])
        self._second.mul_(BETAS[1]).addcmul_(grads, grads, value=1 - BETAS[1])
        denominator = (self._second.sqrt() / tick.correction2).add_(EPS)
        self._weights.sub_((self._first * (tick.rates / tick.correction1)).div_(denominator))


class SlowAdamW(AdamW):
    """AdamW with a slow first moment, mixed with the gradient (QHAdam, arXiv 1810.06801), as MT-DAO has it."""

    share = 0.95  # of the first moment

    def step(self, grads_swn: Tensor, tick: Tick) -> None:
        grads = grads_swn[..., self._start :]
        self._weights.mul_(1 - tick.rates * WEIGHT_DECAY)
        self._first.lerp_(grads, 1 - SLOW_BETA)
        self._second.mul_(BETAS[1]).addcmul_(grads, grads, value=1 - BETAS[1])
        denominator = (self._second.sqrt() / tick.correction2).add_(EPS)
        update = grads * (1 - self.share) + self._first * (self.share / tick.slow_correction)
        self._weights.sub_(update.mul_(tick.rates).div_(denominator))


class Muon:
    """torch.optim.Muon for the matrices in the layers, AdamW for the embedding and the norms, at one learning rate.

    Muon's updates are scaled as with `adjust_lr_fn="match_rms_adamw"`, so one rate is suitable for both.
    """

    momentum = MUON_MOMENTUM

    def __init__(self, weights_swn: Tensor, model: StackedGPT) -> None:
        self._num_hidden = model.num_hidden
        self._hidden = weights_swn[..., : self._num_hidden]
        self._momentum = torch.zeros_like(self._hidden, memory_format=torch.contiguous_format)
        self._rest = self._optimizer_of_rest(weights_swn, model)
        self.moments = [self._momentum, *self._rest.moments]
        # Kinds of matrices by the shape in which they are orthogonalized.
        self._kinds: dict[tuple[int, int], list[tuple[int, int, torch.Size]]] = defaultdict(list)
        for start, count, shape in model.hidden_kinds():
            self._kinds[min(shape), max(shape)].append((start, count, shape))

    def _optimizer_of_rest(self, weights_swn: Tensor, model: StackedGPT) -> InnerOptimizer:
        return AdamW(weights_swn, model, start=model.num_hidden)

    def step(self, grads_swn: Tensor, tick: Tick) -> None:
        self._rest.step(grads_swn, tick)
        grads = grads_swn[..., : self._num_hidden]
        self._momentum.lerp_(grads, 1 - self.momentum)
        updates_rn = grads.lerp(self._momentum, self.momentum).flatten(0, 1)
        for (_, longest), kinds in self._kinds.items():
            matrices = [
                updates_rn[:, start : start + count * shape.numel()].unflatten(1, (count, *shape)).bfloat16()
                for start, count, shape in kinds
            ]
            wide = [
                matrix if shape[0] <= shape[1] else matrix.mT
                for matrix, (_, _, shape) in zip(matrices, kinds, strict=True)
            ]
            stacked = torch.cat(wide, dim=1)
            orthogonal = orthogonalize(stacked.flatten(0, 1)).view_as(stacked)
            parts = orthogonal.split([count for _, count, _ in kinds], dim=1)
            for part, (start, count, shape) in zip(parts, kinds, strict=True):
                columns = updates_rn[:, start : start + count * shape.numel()].unflatten(1, (count, *shape))
                columns.copy_(part if shape[0] <= shape[1] else part.mT)
                columns.mul_(0.2 * longest**0.5)
        self._hidden.mul_(1 - tick.rates * WEIGHT_DECAY)
        self._hidden.sub_(updates_rn.view_as(grads).mul_(tick.rates))


class Orthogonal:
    """Steps along the gradients of the matrices in the layers, which Dion has made orthogonal; AdamW for the rest."""

    def __init__(self, weights_swn: Tensor, model: StackedGPT) -> None:
        self._hidden = weights_swn[..., : model.num_hidden]
        self._rest = AdamW(weights_swn, model, start=model.num_hidden)
        self.moments = self._rest.moments

    def step(self, grads_swn: Tensor, tick: Tick) -> None:
        self._rest.step(grads_swn, tick)
        self._hidden.mul_(1 - tick.rates * WEIGHT_DECAY)
        self._hidden.sub_(grads_swn[..., : self._hidden.shape[-1]] * tick.rates)


class Sign:
    """Steps along the signs of the gradients, from column `start` on: AdamW with betas of 0 and without eps."""

    def __init__(self, weights_swn: Tensor, model: StackedGPT, start: int = 0, scale: float = 1.0) -> None:
        self._start, self._scale = start, scale
        self._weights = weights_swn[..., start:]
        self.moments: list[Tensor] = []

    def step(self, grads_swn: Tensor, tick: Tick) -> None:
        self._weights.mul_(1 - tick.rates * WEIGHT_DECAY)
        self._weights.sub_(grads_swn[..., self._start :].sign() * (self._scale * tick.rates))


class MuonOfSums(Muon):
    """Muon without momentum, for gradients that are sums over steps; steps along the signs for the rest."""

    momentum = 0.0
    share_of_rest = 0.2  # of the rate: about the size of AdamW's updates

    def _optimizer_of_rest(self, weights_swn: Tensor, model: StackedGPT) -> InnerOptimizer:
        return Sign(weights_swn, model, start=model.num_hidden, scale=self.share_of_rest)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return torch.optim.Muon's Newton-Schulz iteration of bfloat16 matrices [K, m, n] with m <= n."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=MUON_EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Inner(NamedTuple):
    """An inner optimizer of the benchmark's rows.

    Attributes:
        create: creates it, given the weights [S, W, N] and the model.
        middle_rate: the learning rate in the middle of its grid.
        label: its name in tables.
        ddp_row: the row of DDP with the same optimizer; DDP needs its momentum.
    """

    create: Callable[[Tensor, StackedGPT], InnerOptimizer]
    middle_rate: float
    label: str
    ddp_row: str


OPTIMIZERS = {
    "adamw": Inner(AdamW, 1.0e-2, "AdamW", "adamw_ddp"),
    "slow_adamw": Inner(SlowAdamW, 1.0e-2, "AdamW with a slow momentum", "adamw_ddp"),
    "sign": Inner(Sign, 3.0e-3, "AdamW, betas 0", "adamw_ddp"),
    "muon": Inner(Muon, 1.5e-2, "Muon", "muon_ddp"),
    "muon_of_sums": Inner(MuonOfSums, 1.5e-2, "Muon, momentum 0", "muon_ddp"),
    "orthogonal": Inner(Orthogonal, 1.5e-2, "its own", "muon_ddp"),
}


def newton_schulz_flops(model: StackedGPT) -> float:
    """Return the operations of the Newton-Schulz iterations of all matrices of a replica in one step."""
    by_matrix = (
        2 * min(parameter.shape) ** 2 * (2 * max(parameter.shape) + min(parameter.shape))
        for parameter in model.hidden_parameters
    )
    return NEWTON_SCHULZ_STEPS * sum(by_matrix)
