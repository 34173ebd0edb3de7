"""Running means (EMA, SWA) of weights that differ between ranks: noticed with a warning, or averaged on request."""

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

# On a module that is averaged over the ranks, by whatever attachment of this process; of a copy it is another id.
_MARK = "_torchbagua_averaged"


class RunningMeans:
    """The running means that a loop keeps of attached weights, while these differ between ranks.

    Those that `add` was given are averaged over the ranks. Of others, torch's AveragedModel is noticed, if it has no
    other parameters than the module: Python's heap is searched for it after the first step and before the end, for
    16 ms each time in a program that has just imported torch.

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
        self._average(module)  # first: ranks compare what they add
        self._added[id(module)] = module
        setattr(module, _MARK, id(module))

    def average(self) -> None:
        """Average what was added over the ranks. Collective if something was."""
        for module in self._added.values():
            self._average(module)

    def close(self) -> None:
        """Forget what was added."""
        for module in self._added.values():
            vars(module).pop(_MARK, None)
        self._added.clear()

    def after_step(self) -> None:
        """Warn if a running mean was updated since the last call of this or of `after_averaged`."""
        if self._num_writes is None:
            self._num_writes = {weakref.ref(mean): num_writes(mean.n_averaged) for mean in self._search()}
        elif not self._has_warned:
            for reference, known in self._num_writes.items():
                if (mean := reference()) is not None and num_writes(mean.n_averaged) != known:
                    self._warn(mean)

    def after_averaged(self) -> None:
        """Take note that ranks held the same weights until now: an update by those is right."""
        means = [mean for reference in self._num_writes or () if (mean := reference()) is not None]
        self._num_writes = {weakref.ref(mean): num_writes(mean.n_averaged) for mean in means}

    def before_end(self) -> None:
        """Warn if a running mean was updated that was made after the first step."""
        if self._num_writes is None or self._has_warned:
            return
        self.after_step()
        known_ids = {id(reference()) for reference in self._num_writes}
        for mean in self._search():
            if id(mean) not in known_ids and bool(mean.n_averaged):
                self._warn(mean)

    def _search(self) -> list[AveragedModel]:
        """Return each AveragedModel whose parameters have shapes of the module's."""
        own = Counter(parameter.shape for parameter in self._module.parameters())
        # Not isinstance, which asks proxies for their class. Another thread may be making one.
        found = [
            one for one in gc.get_referrers(*_with_subclasses(AveragedModel)) if AveragedModel in type(one).__mro__
        ]
        means = [mean for mean in found if "n_averaged" in vars(mean).get("_buffers", ())]
        return [mean for mean in means if Counter(parameter.shape for parameter in mean.parameters()) <= own]

    def _warn(self, mean: AveragedModel) -> None:
        if self._has_warned or any(vars(part).get(_MARK) == id(part) for part in mean.modules()):
            return
        self._has_warned = True
        warn_user(
            f"torchbagua: {type(mean).__name__} keeps a running mean of this rank's own weights, which differ between "
            f"ranks under {type(self._runner.algorithm).__name__}. Call average_also(model) of what attach returned, "
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
