"""QAdamOptimizer: Adam, and after a warm-up, Adam with a frozen second moment.

Update t of a parameter x, with the symbols of 1-bit Adam (Tang et al., arXiv 2102.02888, algorithm 1). The bias
corrections are Adam's (Kingma and Ba, arXiv 1412.6980, algorithm 1), and so is the bound c (section 2.1).

    m = beta1 m + (1 - beta1) g
    if t <= T_w: v = beta2 v + (1 - beta2) g^2                  # warm-up: torch.optim.Adam.step
    mhat = m / (1 - beta1^t)
    vhat = v / (1 - beta2^min(t, T_w))
    ratio = mhat / (sqrt(vhat) + eps)
    if t > T_w: clip ratio to [-c, c], c = max(1, (1 - beta1) / sqrt(1 - beta2))
    x = x - gamma * ratio
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchbagua import native
from torchbagua._torch import leave_scaling_to_scaler, mark_as_stepped, num_writes, unhooked_step
from torchbagua.native.qadam import qadam_update
from torchbagua.runtime.optimizer_steps import parameters_of, unwrap
from torchbagua.runtime.parameters import MemoryOrder, flatten_like

# Key in the state of a parameter: the number of updates since its warm-up. Adam's own "step" is frozen with the second
# moment, whose bias it corrects, so that Adam can continue from this state.
_UPDATES_SINCE = "updates_since_warmup"

# Key in a group that has a parameter past its warm-up: the betas of the warm-up.
_FROZEN_BETAS = "frozen_betas"


class _Known(NamedTuple):
    step: Tensor
    num_writes: int
    num_updates: int


class AdamUpdates:
    """Caches Adam's "step" of each parameter, which with `fused=True` is on the parameter's device.

    It is read once, and again after other code has replaced it or written to it, for example by loading a state.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by the parameter's id

    def of(self, parameter: Tensor, state: Mapping[str, Any]) -> int:
        """Return the number of updates. `state` is Adam's state of the parameter, which is empty before the first."""
        if not state:
            return 0
        step = state["step"]
        known = self._known.get(id(parameter))
        if known is None or known.step is not step or known.num_writes != num_writes(step):
            known = self._known[id(parameter)] = _Known(step, num_writes(step), int(step))
        return known.num_updates

    def set_to(self, num_updates: int, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Record `num_updates`, after Adam has written to the parameter's `state`."""
        self._known[id(parameter)] = _Known(state["step"], num_writes(state["step"]), num_updates)


def check_group(group: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError, which names the option, if a param group of QAdamOptimizer is invalid."""
    warmup_steps = group["warmup_steps"]
    if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool):
        raise TypeError(f"QAdamOptimizer: warmup_steps must be an integer, got {warmup_steps!r}")
    if warmup_steps < 1:
        raise ValueError(f"QAdamOptimizer: warmup_steps must be at least 1, got {warmup_steps}")
    check_numbers(group)
    for option in ("amsgrad", "capturable", "differentiable"):
        if group[option]:
            raise ValueError(f"QAdamOptimizer: {option} must be False, got {group[option]!r}")
    for option in ("maximize", "decoupled_weight_decay"):
        if not isinstance(group[option], bool):
            raise TypeError(f"QAdamOptimizer: {option} must be True or False, got {group[option]!r}")
    for parameter in group["params"]:
        if parameter.is_complex():
            raise ValueError(f"QAdamOptimizer: params must be real, got a parameter of dtype {parameter.dtype}")


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if lr, eps, weight_decay or betas are invalid for Adam."""
    for name in ("lr", "eps", "weight_decay"):
        value = options[name]
        if not _is_number(value):
            raise TypeError(f"QAdamOptimizer: {name} must be a number, got {value!r}")
        if not value >= 0:  # NaN compares false
            raise ValueError(f"QAdamOptimizer: {name} must be at least 0, got {value}")
    betas = options["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(map(_is_number, betas)):
        raise TypeError(f"QAdamOptimizer: betas must be two numbers, got {betas!r}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"QAdamOptimizer: betas must be two numbers in [0, 1), got {betas}")


def _is_number(value: object) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


class QAdamOptimizer(torch.optim.Adam):
    """Adam for the first steps, then Adam with a frozen second moment.

    The first `warmup_steps` updates of each parameter are bitwise equal to those of `torch.optim.Adam`. Then the second
    moment v and its bias correction are frozen. Only the momentum changes, which `QAdamAlgorithm` averages (1-bit Adam,
    Tang et al., arXiv 2102.02888; Bagua, arXiv 2107.01499). With W warm-up steps, update t is m = b1 m + (1 - b1) g and
    w -= lr m / (1 - b1^t) / (sqrt(v / (1 - b2^W)) + eps). Weight decay is that of Adam or of AdamW.

    An element with almost no gradient during the warm-up has a tiny v. Therefore the magnitude of the factor that
    multiplies lr is clipped to max(1, (1 - b1) / sqrt(1 - b2)), its maximum in Adam (Kingma and Ba, arXiv 1412.6980,
    section 2.1). An element with v = 0 does not change.

    A `state_dict` of this optimizer can be loaded into torch.optim.Adam, and vice versa. Each group may have its own
    `warmup_steps`.

    Args:
        params: real parameters, or groups of real parameters. Steps of float64 parameters are computed in float64.
        lr: the learning rate, as in Adam.
        warmup_steps: the number of training steps that update a parameter before its second moment is frozen. It counts
            the steps that the optimizer takes: accumulated backward passes are one step, and a step that GradScaler
            skips is not counted. A step in which a parameter has no gradient does not count for that parameter.
        betas: the decay rates of the two moments, as in Adam.
        eps: the constant added to the denominator, as in Adam.
        weight_decay: as in Adam.
        decoupled_weight_decay: decay weights as AdamW does.
        maximize: as in Adam.
        foreach: as in Adam; affects only the warm-up.
        fused: as in Adam; affects only the warm-up.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        self._group_of: dict[int, dict[str, Any]] = {}
        self._adam_updates = AdamUpdates()
        self._default_warmup_steps = warmup_steps
        self._averager: weakref.ref[object] | None = None
        check_numbers({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self.defaults["warmup_steps"] = warmup_steps
        leave_scaling_to_scaler(self)  # otherwise a fused Adam would have to unscale and skip steps itself
        native.load()

    @classmethod
    def wrap(cls, optimizer: torch.optim.Adam, warmup_steps: int = 100) -> "QAdamOptimizer":
        """Return a QAdamOptimizer that continues from the current state of `optimizer`, an Adam or AdamW.

        Both share parameter groups, state and gradients, so do not step `optimizer` any more. Its schedulers continue
        to set the learning rates. Its updates so far count as warm-up.

        Raises:
            TypeError: `optimizer` is neither Adam nor AdamW.
            ValueError: `optimizer` has an option that QAdam does not have: amsgrad, capturable or differentiable.
        """
        optimizer = unwrap(optimizer)
        if not isinstance(optimizer, torch.optim.Adam) or isinstance(optimizer, cls):
            raise TypeError(f"QAdamOptimizer.wrap: optimizer must be an Adam or AdamW, got {type(optimizer).__name__}")
        for option in ("amsgrad", "capturable", "differentiable"):
            if any(group[option] for group in optimizer.param_groups):
                raise ValueError(f"QAdamOptimizer.wrap: optimizer must not use {option}, got {option}=True")
        first = optimizer.param_groups[0]
        own = cls(first["params"], warmup_steps=warmup_steps)
        own.defaults.update(optimizer.defaults)
        own.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        mark_as_stepped(optimizer)
        return own

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Its parameters start their own warm-up.

        Raises:
            TypeError, ValueError: an option of the group is not allowed, or a parameter is complex.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("warmup_steps", self._default_warmup_steps)
        try:
            check_group(group)
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise
        self._group_of |= {id(parameter): group for parameter in group["params"]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state, which may be Adam's."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's is not typed
        self._averager = getattr(self, "_averager", None)
        self._adam_updates = AdamUpdates()
        self._default_warmup_steps = self.defaults["warmup_steps"]
        self._adopt_groups()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of Adam. Adam's state leaves each group's `warmup_steps` unchanged."""
        groups = self.param_groups
        saved = [
            {"warmup_steps": own["warmup_steps"], **given}
            for own, given in zip(groups, state_dict["param_groups"], strict=False)
        ]
        super().load_state_dict({**state_dict, "param_groups": saved + state_dict["param_groups"][len(saved) :]})
        groups[:] = self.param_groups  # keep the list object that schedulers of a wrapped optimizer iterate over
        self.param_groups = groups

    def _adopt_groups(self) -> None:
        for group in self.param_groups:
            group.setdefault("warmup_steps", self._default_warmup_steps)
            check_group(group)
        self._group_of = {id(parameter): group for group in self.param_groups for parameter in group["params"]}

    def attach_averager(self, averager: object) -> None:
        """Allow steps after the warm-up while `averager`, which averages momenta, exists. Only one at a time."""
        if self.has_averager:
            gc.collect()  # an unreferenced averager of a standalone hook exists until then
        if self.has_averager:
            raise ValueError("QAdamAlgorithm: q_adam_optimizer is already attached; detach it first")
        self._averager = weakref.ref(averager)

    def detach_averager(self, averager: object) -> None:
        """Undo `attach_averager`."""
        if self._averager is not None and self._averager() is averager:
            self._averager = None

    @property
    def has_averager(self) -> bool:
        """Whether momenta are averaged."""
        return self._averager is not None and self._averager() is not None

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters that the optimizer trains, group by group."""
        return parameters_of(self)

    @property
    def num_updates(self) -> list[int]:
        """Updates of each parameter so far."""
        return list(map(self._num_updates_of, self.parameters))

    @property
    def num_updates_past_warmup(self) -> dict[int, int]:
        """Updates so far of the parameters with a frozen second moment, by their index in `parameters`."""
        return {
            index: self._num_updates_of(parameter)
            for index, parameter in enumerate(self.parameters)
            if self.is_past_warmup(parameter)
        }

    def _num_updates_of(self, parameter: Tensor) -> int:
        state = self.state.get(parameter, {})
        since: int = state.get(_UPDATES_SINCE, 0)
        return self._adam_updates.of(parameter, state) + since

    def adopt_momentum(self, parameter: Tensor, momentum: Tensor) -> None:
        """Set the momentum to that of a step after the warm-up that other ranks take and this rank does not."""
        state = self.state[parameter]
        state["exp_avg"].copy_(momentum)
        state[_UPDATES_SINCE] = state.get(_UPDATES_SINCE, 0) + 1

    def beta1_of(self, parameter: Tensor) -> float:
        """Return the decay rate of the momentum of `parameter`."""
        beta1: float = self._group_of[id(parameter)]["betas"][0]
        return beta1

    def is_past_warmup(self, parameter: Tensor) -> bool:
        """Return whether the second moment of `parameter` is frozen.

        Raises:
            ValueError: betas were changed after the end of the warm-up.
        """
        group, state = self._group_of.get(id(parameter)), self.state.get(parameter)
        if group is None or not state:
            return False
        if not state.get(_UPDATES_SINCE) and self._adam_updates.of(parameter, state) < group["warmup_steps"]:
            return False
        frozen, betas = tuple(group.setdefault(_FROZEN_BETAS, group["betas"])), tuple(group["betas"])
        if betas != frozen:
            raise ValueError(
                f"QAdamOptimizer: betas must stay {frozen} after the warm-up, which freezes the second moment and its "
                f"bias correction, got {betas}; pass cycle_momentum=False to OneCycleLR or CyclicLR"
            )
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step: Adam's for parameters in their warm-up, QAdam's for parameters past their warm-up.

        Raises:
            RuntimeError: parameters are past their warm-up, but no QAdamAlgorithm averages their momenta.
            ValueError: gradients are sparse, or betas were changed after the warm-up.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not all("warmup_steps" in group for group in self.param_groups):  # added to the wrapped optimizer
            self._adopt_groups()
        with torch.no_grad():
            with_gradient = [parameter for parameter in self.parameters if parameter.grad is not None]
            for parameter in with_gradient:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    raise ValueError(
                        "QAdamOptimizer: gradients must be dense, got a sparse gradient of shape "
                        f"{list(parameter.shape)}"
                    )
            warm: list[Tensor] = []
            past: list[Tensor] = []
            for parameter in with_gradient:
                (past if self.is_past_warmup(parameter) else warm).append(parameter)
            if past and not self.has_averager:
                raise RuntimeError(
                    "QAdamOptimizer: after the warm-up of "
                    f"{self._group_of[id(past[0])]['warmup_steps']} steps, momenta must be averaged; call "
                    "torchbagua.attach(ddp, optimizer, torchbagua.QAdamAlgorithm(optimizer))"
                )
            if warm or not past:
                self._adam_step(warm, without=past)
            self._update(past)
        return loss

    def _adam_step(self, warm: list[Tensor], without: list[Tensor]) -> None:
        counts = [self._adam_updates.of(parameter, self.state[parameter]) for parameter in warm]
        gradients = [parameter.grad for parameter in without]
        for parameter in without:  # Adam steps every parameter that has a gradient
            parameter.grad = None
        try:
            unhooked_step(torch.optim.Adam.step)(self)  # self.step has already called the hooks
        finally:
            for parameter, gradient in zip(without, gradients, strict=True):
                parameter.grad = gradient
        for parameter, count in zip(warm, counts, strict=True):
            self.state[parameter].setdefault(_UPDATES_SINCE, 0)
            self._adam_updates.set_to(count + 1, parameter, self.state[parameter])

    def _update(self, parameters: list[Tensor]) -> None:
        """Take QAdam's step for these parameters, with one kernel call for all parameters that have equal options."""
        batches: dict[tuple[int, int, int, bool], list[Tensor]] = {}
        for parameter in parameters:
            state = self.state[parameter]
            state[_UPDATES_SINCE] = state.get(_UPDATES_SINCE, 0) + 1
            num_warm = self._adam_updates.of(parameter, state)
            is_double = parameter.dtype == torch.float64
            key = (id(self._group_of[id(parameter)]), num_warm, state[_UPDATES_SINCE], is_double)
            batches.setdefault(key, []).append(parameter)
        for (_, num_warm, num_since, is_double), members in batches.items():
            group = self._group_of[id(members[0])]
            lr, decay, is_decoupled = float(group["lr"]), group["weight_decay"], group["decoupled_weight_decay"]
            beta1, beta2 = group["betas"]
            correction1 = 1.0 - beta1 ** (num_warm + num_since)
            tensors = [_flat_tensors(parameter, self.state[parameter]) for parameter in members]
            update = qadam_update if is_double else torch.ops.torchbagua.qadam_update
            update(
                *map(list, zip(*tensors, strict=True)),
                gradient_sign=-1.0 if group["maximize"] else 1.0,
                weight_decay=0.0 if is_decoupled else decay,
                shrink=1.0 - lr * decay if is_decoupled else 1.0,
                beta1=beta1,
                root_correction2=(1.0 - beta2**num_warm) ** 0.5,
                eps=group["eps"],
                largest_ratio=max(1.0, (1.0 - beta1) / (1.0 - beta2) ** 0.5) * correction1,
                step_size=lr / correction1,
            )
            for parameter, (weight, _, momentum, _) in zip(members, tensors, strict=True):
                for changed, result in ((parameter, weight), (self.state[parameter]["exp_avg"], momentum)):
                    if result.data_ptr() != changed.data_ptr():  # a copy
                        changed.copy_(MemoryOrder(parameter).shape(result))


def _flat_tensors(parameter: Tensor, state: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return weight, gradient and both moments as 1-D tensors in the same memory order: views or copies."""
    assert parameter.grad is not None
    tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
    return tuple(flatten_like(parameter, tensor) for tensor in tensors)
