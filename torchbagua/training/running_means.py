"""Running means (EMA, SWA) of weights that differ between ranks: reported in a warning, or averaged on request."""

import gc
import weakref
from collections import Counter
from itertools import chain

import torch
from torch.optim.swa_utils import AveragedModel

from torchbagua._torch import num_writes
from torchbagua._warnings import warn_user
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.shards import local_shard

# Attribute of a module that any attachment of this process averages over the ranks. Its value is the module's id, so it
# does not apply to a copy.
_MARK = "_torchbagua_averaged"


class RunningMeans:
    """The running means that a loop updates with attached weights that differ between ranks.

    Modules passed to `add` are averaged over the ranks. Otherwise only torch's AveragedModel is detected, and only if
    the shapes of its parameters all occur in the module. To find it, Python's heap is searched after the first step and
    before the end. A search takes 16 ms in a program that has just imported torch.

    Args:
        module: the attached module, without its DDP.
        runner: averages its weights.
    """

    def __init__(self, module: torch.nn.Module, runner: Runner) -> None:
        self._module = module
        self._runner = runner
        self._added: dict[int, torch.nn.Module] = {}  # by id
        self._num_writes: dict[weakref.ref[AveragedModel], int] | None = None  # None before the first step
        self._has_warned = False

    def add(self, module: torch.nn.Module) -> None:
        """Average the weights of `module` over the ranks, now and at each `average`. Collective."""
        self._average(module)  # first, since ranks compare the added modules in it
        self._added[id(module)] = module
        setattr(module, _MARK, id(module))

    def average(self) -> None:
        """Average the added modules over the ranks. Collective if any was added."""
        for module in self._added.values():
            self._average(module)

    def close(self) -> None:
        """Forget the added modules."""
        for module in self._added.values():
            vars(module).pop(_MARK, None)
        self._added.clear()

    def after_step(self) -> None:
        """Warn if a running mean was updated since the last call of `after_step` or `after_averaged`."""
        if self._num_writes is None:
            self._num_writes = {weakref.ref(mean): num_writes(mean.n_averaged) for mean in self._search()}
        elif not self._has_warned:
            for reference, known in self._num_writes.items():
                if (mean := reference()) is not None and num_writes(mean.n_averaged) != known:
                    self._warn(mean)

    def after_averaged(self) -> None:
        """Accept all updates so far: ranks had equal weights until now, so updates with them are correct."""
        means = [mean for reference in self._num_writes or () if (mean := reference()) is not None]
        self._num_writes = {weakref.ref(mean): num_writes(mean.n_averaged) for mean in means}

    def before_end(self) -> None:
        """Warn if a running mean that was created after the first step has been updated."""
        if self._num_writes is None or self._has_warned:
            return
        self.after_step()
        known_ids = {id(reference()) for reference in self._num_writes}
        for mean in self._search():
            if id(mean) not in known_ids and bool(mean.n_averaged):
                self._warn(mean)

    def _search(self) -> list[AveragedModel]:
        """Return each AveragedModel whose parameters' shapes all occur in the module."""
        own = Counter(parameter.shape for parameter in self._module.parameters())
        # Not isinstance, which asks proxies for their class. Another thread may still be constructing a mean.
        found = [
            obj for obj in gc.get_referrers(*_with_subclasses(AveragedModel)) if AveragedModel in type(obj).__mro__
        ]
        means = [mean for mean in found if "n_averaged" in vars(mean).get("_buffers", ())]
        return [mean for mean in means if Counter(parameter.shape for parameter in mean.parameters()) <= own]

    def _warn(self, mean: AveragedModel) -> None:
        if self._has_warned or any(vars(part).get(_MARK) == id(part) for part in mean.modules()):
            return
        self._has_warned = True
        warn_user(
            f"torchbagua: {type(mean).__name__} keeps a running mean of this rank's own weights, which differ between "
            f"ranks with {type(self._runner.algorithm).__name__}. Call average_also(model) of the Attachment, "
            "which averages it over the ranks in averaged_weights() and in detach(); or update it within "
            "averaged_weights()"
        )

    def _average(self, module: torch.nn.Module) -> None:
        weights = self._runner.weights
        if weights is None:
            raise NotImplementedError(f"average_also: {type(self._runner.impl).__name__} must call runner.average")
        tensors = [local_shard(tensor) for tensor in chain(module.parameters(), module.buffers())]
        inexact = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        weights.means.average_tensors(inexact, f"a {type(module).__name__}'s weights")


def _with_subclasses(cls: type) -> list[type]:
    return [cls, *chain.from_iterable(map(_with_subclasses, cls.__subclasses__()))]
