"""Recognizes state tensors of optimizers that hold weights which nothing averages, and warns of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchbagua._warnings import warn_user
from torchbagua.runtime.optimizer_steps import parameters_of, state_of
from torchbagua.runtime.parameters import local_shard
from torchbagua.runtime.weight_runner import WeightRunner
from torchbagua.training.weights import RankWeights

# The steps of an optimizer after which its state is examined. In the first step a momentum is still parallel to the
# gradient, and a copy of the weights still close to them.
_EXAMINED_STEPS = (1, 10)
# The number of elements of each parameter that are compared, and the fewest of all parameters together that count.
_SAMPLE, _FEWEST = 512, 8
# Weights in a state are near the module's: the cosine of the angle between them, and the ratio of their norms.
_LEAST_COSINE, _LARGEST_RATIO = 0.8, 4.0
# The state tensors of torch's optimizers that have a parameter's shape, none of which holds weights.
_NO_WEIGHTS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "step_size", "variance"),
}


class UnaveragedState:
    """Warns once of state tensors that hold weights, which differ between ranks.

    A state tensor is taken for weights if, over all parameters together and whenever it was examined, it was nearly
    parallel to the weights, had about their norm, and was less parallel to the gradient; and if it has changed. So a
    momentum is not taken for weights, and neither is a copy of the first weights.
    """

    _has_warned = False

    def __init__(self, weights: RankWeights, runner: WeightRunner) -> None:
        self._watches = runner.step_watches
        self._averaged = weights.names_in
        self._algorithm = runner.name
        self._seen = {watch.optimizer: _Seen() for watch in self._watches}
        for watch in self._watches:
            watch.add(self._after_step, reads_overflow=False)
        weights.call_before_means(self.examine)

    def examine(self) -> None:
        """Examine the optimizers' state, before weights are averaged."""
        for optimizer in self._seen:
            self._examine(optimizer, after_step=False)

    def close(self) -> None:
        """Stop watching."""
        for watch in self._watches:
            watch.remove(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, is_taken: bool) -> None:
        seen = self._seen[optimizer]
        seen.num_steps += is_taken
        if is_taken and seen.num_steps in _EXAMINED_STEPS:
            self._examine(optimizer, after_step=True)
        if seen.num_steps >= _EXAMINED_STEPS[-1]:
            for watch in self._watches:
                if watch.optimizer is optimizer:
                    watch.remove(self._after_step)

    @torch.no_grad()
    def _examine(self, optimizer: torch.optim.Optimizer, *, after_step: bool) -> None:
        if self._has_warned or not state_of(optimizer):
            return
        seen = self._seen[optimizer]
        found = []
        for name, parameters in _tensors_by_name(optimizer).items():
            if name in seen.no_weights or name in _NO_WEIGHTS or name in self._averaged(optimizer):
                continue
            if name not in seen.first and not after_step:  # `eval` may store the training weights in the state
                continue
            state = _sample([state_of(optimizer)[parameter][name] for parameter in parameters])
            weights = _sample(parameters)
            gradients = _sample([_gradient_of(weight) for weight in parameters])
            if len(state) < _FEWEST:
                continue
            products = [state @ state, weights @ weights, gradients @ gradients, state @ weights, state @ gradients]
            of_state, of_weights, of_gradients, with_weights, with_gradients = torch.stack(products).tolist()
            if not of_weights:  # parameters that begin at zero, and have not moved
                continue
            cosine = with_weights / (of_state * of_weights) ** 0.5 if of_state else 0.0
            of_gradient = with_gradients / (of_state * of_gradients) ** 0.5 if of_state * of_gradients else 0.0
            is_near = 1 / _LARGEST_RATIO**2 <= of_state / of_weights <= _LARGEST_RATIO**2
            if not (is_near and cosine >= _LEAST_COSINE and cosine > of_gradient):  # also with NaN
                seen.no_weights.add(name)
            elif not torch.equal(seen.first.setdefault(name, state), state):
                found.append(name)
        if found:
            self._has_warned = True
            named = " and ".join(map(repr, found))
            calls = " and ".join(f"average_also(optimizer, {name!r})" for name in found)
            warn_user(
                f"torchbagua: {type(optimizer).__name__} keeps weights in its state {named}, which differ between "
                f"ranks with {self._algorithm}: averaged_weights() leaves them so, and detach() gives all ranks rank "
                f"0's. Call {calls} of the Attachment, which averages them in both"
            )


@dataclass
class _Seen:
    """The observations of one optimizer: a sample of its state tensors when they were first seen, by name."""

    num_steps: int = 0
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    no_weights: set[str] = field(default_factory=set)


def _tensors_by_name(optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    """Return the parameters by the names of their state tensors, if these have the parameter's shape everywhere."""
    by_name: dict[str, list[torch.Tensor]] = {}
    others = set()
    for parameter in parameters_of(optimizer):
        state = state_of(optimizer).get(parameter, {})
        for name, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point():
                by_name.setdefault(name, []).append(parameter)
            else:
                others.add(name)
    return {name: parameters for name, parameters in by_name.items() if name not in others}


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    return torch.zeros_like(parameter) if gradient is None or gradient.layout is not torch.strided else gradient


def _sample(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the same elements of all tensors of a parameter's shape, as one vector."""
    flats = [local_shard(tensor).detach().reshape(-1) for tensor in tensors]
    return torch.cat([flat[:: -(-len(flat) // _SAMPLE) or 1].float() for flat in flats])
