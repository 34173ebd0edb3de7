"""The shadow weights of DiLoCo, identical on all ranks and in float32, and the outer optimizer that steps them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchbagua.codecs.base import sum_dtype
from torchbagua.collectives.agreement import fingerprint_of_values
from torchbagua.runtime.bucket import BaguaBucket, BaguaTensor
from torchbagua.runtime.sub_buckets import sub_bucket_of
from torchbagua.runtime.weight_buckets import WeightBucket, WeightBuckets

OuterOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@dataclass(eq=False)
class ShadowBucket:
    """The shadow weights of one bucket of parameters.

    Attributes:
        theta: the shadow weights, in float32, or in float64 for float64 weights.
        gradient: a bucket with theta's dtype: the weights' own bucket if the weights have this dtype. Its flat tensor
            contains the outer gradient, then the mean outer gradient, and then the difference to add to the weights.
    """

    theta: torch.Tensor
    gradient: BaguaBucket


class ShadowWeights:
    """The shadow weights of all parameters. All ranks apply the same received means, so they are bitwise equal.

    Args:
        owner: the name of the algorithm, for errors.
        make_optimizer: creates the outer optimizer of the shadow weights, given a view for each parameter.

    Attributes:
        optimizer: the outer optimizer; None without parameters.
    """

    def __init__(self, owner: str, make_optimizer: OuterOptimizer) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        self._owner = owner
        self._make_optimizer = make_optimizer
        self._shadows: dict[WeightBucket, ShadowBucket] = {}
        self._names: dict[int, str] = {}  # by the id of the view
        self._views: dict[str, torch.Tensor] = {}

    def __getitem__(self, bucket: WeightBucket) -> ShadowBucket:
        """Return the shadow weights of a bucket of parameters."""
        return self._shadows[bucket]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The shadow weights, as flat tensors."""
        return [shadow.theta for shadow in self._shadows.values()]

    def rebuild(self, weights: WeightBuckets) -> None:
        """Rebuild the shadow weights for new buckets. Those of new parameters start as this rank's weights.

        Raises:
            TypeError, ValueError: `make_optimizer` did not return an optimizer of the given tensors.
        """
        previous = None if self.optimizer is None else self.state_dict()
        self._shadows = {}
        for bucket in weights:
            if not bucket.are_buffers:
                flat, dtype = bucket.flat, sum_dtype(bucket.flat.dtype)
                has_same_dtype = flat.dtype == dtype
                gradient = bucket if has_same_dtype else sub_bucket_of(bucket, bucket.tensors, dtype)
                self._shadows[bucket] = ShadowBucket(torch.empty_like(flat, dtype=dtype), gradient)
        weights.read(lambda bucket: self[bucket].theta, self._shadows)
        self._views = {
            name: view for bucket, own in self._shadows.items() for name, view in bucket.named(own.theta).items()
        }
        self._names = {id(view): name for name, view in self._views.items()}
        if self._views:
            self.optimizer = self._check_optimizer(self._make_optimizer(list(self._views.values())))
        if previous is not None:
            self._load(previous["theta"], previous["outer"])

    @torch.no_grad()
    def restart(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace the shadow weights of the given parameters, and reset their outer optimizer state."""
        loaded = {name: value for name, value in values.items() if name in self._views}
        if self.optimizer is None or not loaded:
            return
        new = self._make_optimizer(list(self._views.values())).state  # some optimizers have state before the first step
        for name, value in loaded.items():
            view = self._views[name]
            view.copy_(value)
            self.optimizer.state.pop(view, None)
            if view in new:
                self.optimizer.state[view] = new[view]

    @torch.no_grad()
    def step(self, buckets: Iterable[WeightBucket]) -> None:
        """Step the outer optimizer on the means in the gradient buckets, for the shadow weights of the given buckets.

        A parameter with an all-zero mean gets no gradient in that step, like a frozen parameter: its momentum does not
        change.
        """
        parts = [(self._views[tensor.name], part) for bucket in buckets for tensor, part in self._mean_parts(bucket)]
        stepped = [(view, part) for view, part in parts if _is_nonzero(part)]
        for view, mean in stepped:
            view.grad = mean
        if self.optimizer is not None and stepped:
            self.optimizer.step()
        for view, _ in stepped:
            view.grad = None

    def _mean_parts(self, bucket: WeightBucket) -> list[tuple[BaguaTensor, torch.Tensor]]:
        gradient = self[bucket].gradient
        return gradient.views(gradient.flat)

    def digest(self) -> int:
        """Return a number below 2^56 that distinguishes different shadow weights."""
        return fingerprint_of_values(self.tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the shadow weights and of the outer optimizer's state, by parameter name.

        "outer" contains the state under "state" and the hyperparameters of each group under "param_groups".
        """
        if self.optimizer is None:
            return {"theta": {}, "outer": {"state": {}, "param_groups": []}}
        state = self.optimizer.state_dict()
        names = self._optimizer_names(self.optimizer)
        groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        by_name = {names[index]: dict(values) for index, values in state["state"].items()}
        outer: dict[str, Any] = _copy({"state": by_name, "param_groups": groups})
        return {"theta": {name: view.clone() for name, view in self._views.items()}, "outer": outer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned.

        Raises:
            ValueError: names or shapes do not match these parameters.
        """
        shapes = {name: view.shape for name, view in self._views.items()}
        if {name: theta.shape for name, theta in state["theta"].items()} != shapes:
            raise ValueError(
                f"{self._owner}.load_state_dict: the state must contain this module's shadow weights, {len(shapes)} "
                f"tensors, got {len(state['theta'])}; they differ in "
                f"{sorted(shapes.keys() ^ state['theta'].keys())[:5] or 'shapes'}"
            )
        self._load(state["theta"], state["outer"])

    def _load(self, theta: Mapping[str, torch.Tensor], outer: Mapping[str, Any]) -> None:
        """Load the part of the state that belongs to these parameters."""
        known = [name for name, view in self._views.items() if name in theta and theta[name].shape == view.shape]
        for name in known:
            self._views[name].copy_(theta[name])
        if self.optimizer is None:
            return
        groups = self.optimizer.state_dict()["param_groups"]
        if len(groups) != len(outer["param_groups"]):
            raise ValueError(
                f"{self._owner}: the outer optimizer must have the same number of parameter groups as before, "
                f"{len(outer['param_groups'])}, got {len(groups)}"
            )
        numbers = {name: number for number, name in enumerate(self._optimizer_names(self.optimizer))}
        self.optimizer.load_state_dict(
            {
                "state": {numbers[name]: outer["state"][name] for name in known if name in outer["state"]},
                "param_groups": [{**own, **saved} for own, saved in zip(groups, outer["param_groups"], strict=True)],
            }
        )

    def _optimizer_names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the parameter names of `optimizer`, in the order of the indices in its state."""
        return [self._names[id(view)] for group in optimizer.param_groups for view in group["params"]]

    def _check_optimizer(self, optimizer: object) -> torch.optim.Optimizer:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{self._owner}: outer_optimizer must return a torch.optim.Optimizer, got {optimizer!r}")
        given = [id(view) for group in optimizer.param_groups for view in group["params"]]
        if sorted(given) != sorted(self._names):
            raise ValueError(
                f"{self._owner}: outer_optimizer must return an optimizer of the {len(self._names)} given tensors, got "
                f"an optimizer of {len(given)} tensors, including {len(self._names.keys() & set(given))} of these"
            )
        return optimizer


def _is_nonzero(tensor: torch.Tensor) -> bool:
    """Return whether any element is nonzero. Checks the first element first, which usually decides."""
    return bool(tensor.numel()) and (bool(tensor[(0,) * tensor.dim()]) or bool(tensor.any()))


def _copy(value: Any) -> Any:
    """Return nested dicts and lists with copies of their tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
