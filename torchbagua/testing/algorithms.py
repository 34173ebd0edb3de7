"""check_algorithm: tests an algorithm from attach to detach, with ranks as threads of this process."""

import copy
import gc
import io
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import torchbagua as tb
from torchbagua._torch import forget_active_ddp
from torchbagua.testing.simulation.program import MakeOptimizer
from torchbagua.testing.simulation.trial import Subject
from torchbagua.testing.transports.member import Mismatch, OtherMemberFailed
from torchbagua.transport.gloo import gloo_group

Weights = dict[str, torch.Tensor]

_TIMEOUT = timedelta(seconds=20)

_NUM_STEPS = 5
_SAVED_AFTER = 3

# How long threads of the package may take to end.
_PATIENCE_S = 10.0


class AlgorithmFault(AssertionError):
    """An algorithm failed a check. Names the check, the rank, and the expected and actual results."""


def check_algorithm(subject: Subject, *, size: int = 2, has_fixed_results: bool = True) -> list[str]:
    """Test an algorithm from `attach` to `detach`: that it trains, stops, is saved and is resumed as `attach` promises.

    Ranks are threads of this process, over gloo. They train a small module with gradient accumulation, several buckets
    and a GradScaler. `torchbagua.testing.simulation.check` tests the same algorithm with faults.

    Args:
        subject: the algorithm with its optimizer. `train` and `faults` are not used.
        size: the number of ranks, one of `subject.sizes`.
        has_fixed_results: whether the same data give the same weights in every run; False for an algorithm whose
            rounds depend on time. It is then not compared with an uninterrupted training.

    Returns:
        the names of the checks.

    Raises:
        TypeError: `subject` is not a Subject.
        ValueError: `subject` does not support `size` ranks.
        AlgorithmFault: the algorithm failed a check.
    """
    if not isinstance(subject, Subject):
        raise TypeError(f"check_algorithm: subject must be a torchbagua.testing.simulation.Subject, got {subject!r}")
    if size not in subject.sizes:
        raise ValueError(f"check_algorithm: size must be one of subject.sizes, {subject.sizes}, got {size!r}")
    suite = _Suite(subject, size, has_fixed_results)
    with _default_group():
        return [suite.run(check) for check in _CHECKS]


@contextmanager
def _default_group() -> Iterator[None]:
    """Ensure that torch has a default group within the block, as users have one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Suite:
    """Runs the checks, each on all ranks."""

    def __init__(self, subject: Subject, size: int, has_fixed_results: bool) -> None:
        self.subject = subject
        self.size = size
        self.has_fixed_results = has_fixed_results
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            # Several blocks of a codec, a layer of one element, buffers, and a frozen layer.
            self.module = nn.Sequential(
                nn.Linear(12, 301), nn.BatchNorm1d(301), nn.Tanh(), nn.Linear(301, 3), nn.Linear(3, 3), nn.Linear(3, 1)
            )
        self.module[4].requires_grad_(False)

    def run(self, check: "Callable[[_Rank], object]") -> str:
        """Run a check on all ranks, and return its name.

        Raises AlgorithmFault if it fails on any rank, or if it leaves threads.
        """
        name = check.__name__.removeprefix("_check_")
        before = {*threading.enumerate()}
        with warnings.catch_warnings():  # here, since filters belong to all threads
            if check in _WITHOUT_DETACH:
                warnings.simplefilter("ignore", RuntimeWarning)
            try:
                self._run_ranks(name, check)
            finally:
                forget_active_ddp()
            deadline_s = time.monotonic() + _PATIENCE_S
            while left := {*threading.enumerate()} - before:
                if time.monotonic() > deadline_s:
                    names = sorted(thread.name for thread in left)
                    raise AlgorithmFault(f"torchbagua: check {name!r} failed: expected all threads to end, got {names}")
                gc.collect()
                time.sleep(0.01)
        return name

    def _run_ranks(self, name: str, check: "Callable[[_Rank], object]") -> None:
        store, groups = dist.HashStore(), dict[int, dist.ProcessGroup]()  # groups live until all ranks are done
        errors: list[tuple[int, BaseException]] = []  # in the order in which they were raised

        def run(rank: int) -> None:
            try:
                groups[rank] = gloo_group(dist.PrefixStore(name, store), rank, self.size, _TIMEOUT)
                check(_Rank(self, groups[rank]))
            except BaseException as error:  # reported below
                errors.append((rank, error))

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * _TIMEOUT.total_seconds())
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        # An error on one rank ends the others, later.
        errors.sort(key=lambda failed: isinstance(failed[1], tb.CommunicationError | OtherMemberFailed))
        if errors:  # if several ranks raise the same, the lowest one, whichever was first
            same = [failed for failed in errors if type(failed[1]) is type(errors[0][1])]
            rank, error = min(same, key=lambda failed: failed[0])
            what = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
            raise AlgorithmFault(f"torchbagua: check {name!r} failed on rank {rank}: {what}") from error
        if late:
            raise AlgorithmFault(f"torchbagua: check {name!r} did not end on ranks {late}")


class _Rank:
    """One rank of a check."""

    def __init__(self, suite: _Suite, group: dist.ProcessGroup) -> None:
        self.suite = suite
        self.group = group
        self.rank = group.rank()

    def new_trainer(self) -> "_Trainer":
        """Return a new training from the module's first weights."""
        return _Trainer(self)

    def expect_same(self, what: str, actual: Weights, expected: Weights) -> None:
        """Raise Mismatch unless the weights are bitwise equal, on this rank and on all others. Collective."""
        problem = ""
        for name, weight in expected.items():
            if not problem and not torch.equal(actual[name], weight):
                place = int((actual[name] != weight).flatten().nonzero()[0])
                wanted, got = weight.flatten()[place].item(), actual[name].flatten()[place].item()
                problem = f"{what}: expected element {place} of {name} to be {wanted!r}, got {got!r}"
        self.raise_on_all_ranks(problem)

    def expect_trained(self, what: str, after: Weights, before: Weights) -> None:
        """Raise Mismatch unless the weights are finite and have changed. Collective."""
        problem = ""
        if not all(weight.isfinite().all() for weight in after.values()):
            problem = f"{what}: expected finite values, got NaN or Inf"
        elif all(torch.equal(after[name], before[name]) for name in before):
            problem = f"{what}: expected other weights than before, got the same"
        self.raise_on_all_ranks(problem)

    def raise_on_all_ranks(self, problem: str) -> None:
        """Raise an error on all ranks if one has a problem, so that none waits for another. Collective."""
        failed = torch.tensor([bool(problem)], dtype=torch.uint8)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        if problem:
            raise Mismatch(problem)
        if failed.item():
            raise OtherMemberFailed

    def expect_same_on_all_ranks(self, what: str, weights: Weights) -> None:
        """Raise Mismatch unless this rank's weights are those of rank 0. Collective."""
        gathered = {}
        for name, weight in weights.items():
            gathered[name] = weight.clone()
            dist.broadcast(gathered[name], group_src=0, group=self.group)
        self.expect_same(f"{what}, compared with rank 0", weights, gathered)


_make_sgd: MakeOptimizer = partial(torch.optim.SGD, lr=0.01)


class _Trainer:
    """A module with its DDP, optimizer, data, GradScaler and algorithm. Data differ by rank and step."""

    def __init__(
        self,
        rank: _Rank,
        *,
        make_optimizer: MakeOptimizer | None = None,
        around: tuple[nn.Module, DistributedDataParallel] | None = None,
    ) -> None:
        subject = rank.suite.subject
        self.rank = rank
        if around is None:
            self.module: nn.Module = copy.deepcopy(rank.suite.module)
            self.ddp = DistributedDataParallel(self.module, process_group=rank.group, bucket_cap_mb=0.005)
        else:
            self.module, self.ddp = around
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = (make_optimizer or subject.make_optimizer)(trained)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.num_steps = 0

    @cached_property
    def algorithm(self) -> tb.Algorithm:
        """The algorithm for the optimizer."""
        return self.rank.suite.subject.make(self.optimizer)

    def attach(self) -> tb.Attachment:
        """Attach the algorithm. Collective."""
        return tb.attach(self.ddp, self.optimizer, self.algorithm, grad_scaler=self.scaler)

    def step(self, *, factor: float = 1.0) -> Weights:
        """Take a training step of two micro-batches, whose loss has this factor, and return the weights after it."""
        generator = torch.Generator().manual_seed(1000 * self.rank.rank + self.num_steps)
        self.optimizer.zero_grad()
        for context in (self.ddp.no_sync(), nullcontext()):
            with context:
                x = torch.randn(4, 12, generator=generator)
                loss = factor * (self.ddp(x) - x.sum(1, keepdim=True)).square().mean()
                self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.num_steps += 1
        return self.weights()

    def weights(self) -> Weights:
        """Return copies of the parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}

    @property
    def averages_weights(self) -> bool:
        """Whether the algorithm averages weights, so that they differ between ranks."""
        return self.algorithm.averages_weights

    def save(self, attachment: tb.Attachment) -> io.BytesIO:
        """Return a checkpoint of this rank as `torch.save` writes it."""
        state = attachment.rank_state_dict()
        if not self.averages_weights:
            state |= {
                "module": self.module.state_dict(),
                "optimizers": [self.optimizer.state_dict()],
                "grad_scaler": self.scaler.state_dict(),
            }
        file = io.BytesIO()
        torch.save({**state, "num_steps": self.num_steps}, file)
        file.seek(0)
        return file

    def load(self, attachment: tb.Attachment, file: io.BytesIO) -> None:
        """Load a checkpoint. Collective."""
        state = torch.load(file, weights_only=True)
        if not self.averages_weights:
            self.module.load_state_dict(state["module"])
            self.optimizer.load_state_dict(state["optimizers"][0])
            self.scaler.load_state_dict(state["grad_scaler"])
        attachment.load_rank_state_dict(state)
        self.num_steps = state["num_steps"]


def _check_training(rank: _Rank) -> None:
    """Ranks train, and hold equal weights: after each step, or, with a weight algorithm, after `detach`."""
    trainer = rank.new_trainer()
    before = trainer.weights()
    with trainer.attach() as attachment:
        for step in range(_NUM_STEPS):
            weights = trainer.step()
            if not trainer.averages_weights:
                rank.expect_same_on_all_ranks(f"weights after step {step}", weights)
        attachment.detach()
    after = trainer.weights()
    rank.expect_trained("weights after training", after, before)
    rank.expect_same("a frozen layer", {"4.weight": after["4.weight"]}, {"4.weight": before["4.weight"]})
    if getattr(trainer.algorithm, "final_average", True):
        rank.expect_same_on_all_ranks("weights after detach", after)


def _check_repetition(rank: _Rank) -> None:
    """The same data give the same weights again."""
    runs = []
    for _ in range(2):
        trainer = rank.new_trainer()
        with trainer.attach():
            runs.append([trainer.step() for _ in range(_NUM_STEPS)])
        runs[-1].append(trainer.weights())
    if rank.suite.has_fixed_results:
        for step, (first, second) in enumerate(zip(*runs, strict=True)):
            rank.expect_same(f"weights after step {step} of a second training", second, first)


def _check_overflow(rank: _Rank) -> None:
    """Gradients that overflow on one rank leave no NaN behind: the next step is a step as any other."""
    trainer = rank.new_trainer()
    with trainer.attach():
        trainer.step()
        before = trainer.step(factor=torch.inf if rank.rank == 0 else 1.0)
        if not trainer.averages_weights:
            rank.expect_same_on_all_ranks("weights after a step whose gradients overflow on rank 0", before)
        after = trainer.step()
        rank.expect_trained("weights after the step that follows an overflow", after, before)
        if not trainer.averages_weights:
            rank.expect_same_on_all_ranks("weights after the step that follows an overflow", after)


def _check_averaged_weights(rank: _Rank) -> None:
    """`averaged_weights` gives all ranks the same weights, and afterwards training continues as without it."""
    runs: list[list[Weights]] = []
    for is_evaluated in (False, True):
        trainer = rank.new_trainer()
        runs.append([])
        with trainer.attach() as attachment:
            for step in range(_NUM_STEPS):
                runs[-1].append(trainer.step())
                if is_evaluated and step % 2:
                    before = trainer.weights()
                    with attachment.averaged_weights():
                        rank.expect_same_on_all_ranks("weights within averaged_weights", trainer.weights())
                    if rank.suite.has_fixed_results:
                        rank.expect_same("weights after averaged_weights", trainer.weights(), before)
    if rank.suite.has_fixed_results:
        for step, (plain, evaluated) in enumerate(zip(*runs, strict=True)):
            rank.expect_same(f"weights after step {step}, with averaged_weights in between", evaluated, plain)


def _check_resume(rank: _Rank) -> None:
    """A training continues from a saved state as if it had never stopped."""
    first = rank.new_trainer()
    expected = []
    with first.attach() as attachment:
        for step in range(_NUM_STEPS):
            if step == _SAVED_AFTER:
                file = first.save(attachment)
            expected.append(first.step())
    expected.append(first.weights())
    second = rank.new_trainer()
    with second.attach() as attachment:
        second.step()  # loading discards it
        second.load(attachment, file)
        found = [second.step() for _ in range(_SAVED_AFTER, _NUM_STEPS)]
    found.append(second.weights())
    if rank.suite.has_fixed_results:
        for step, (resumed, uninterrupted) in enumerate(zip(found, expected[_SAVED_AFTER:], strict=True), _SAVED_AFTER):
            rank.expect_same(f"weights after step {step} of a resumed training", resumed, uninterrupted)


def _check_refused_states(rank: _Rank) -> None:
    """States of something else raise ValueError before anything is changed."""
    trainer = rank.new_trainer()
    with trainer.attach() as attachment:
        before = trainer.step()
        state = attachment.state_dict()
        other = '{"version": 1, "algorithm": "AnotherAlgorithm", "arguments": {}}'
        for what, wrong in (("an empty state", {}), ("a state of another algorithm", {**state, "algorithm": other})):
            problem = f"load_state_dict of {what}: expected ValueError, got no error"
            try:
                attachment.load_state_dict(wrong)
            except ValueError:
                problem = ""
            rank.raise_on_all_ranks(problem)
        if rank.suite.has_fixed_results:
            rank.expect_same("weights after a refused state", trainer.weights(), before)
        trainer.step()


def _check_detach(rank: _Rank) -> None:
    """After `detach` the module is plain DDP again. A second call does nothing."""
    trainer = rank.new_trainer()
    with trainer.attach() as attachment:
        trainer.step()
        attachment.detach()
        attachment.detach()
    _expect_plain_ddp(rank, trainer.module, trainer.ddp)


def _expect_plain_ddp(rank: _Rank, module: nn.Module, ddp: DistributedDataParallel) -> None:
    """Raise Mismatch unless `ddp` around `module` trains as a new DDP does. Collective."""
    detached = _Trainer(rank, make_optimizer=_make_sgd, around=(module, ddp))
    plain = _Trainer(rank, make_optimizer=_make_sgd)
    plain.ddp.register_comm_hook(rank.group, allreduce_hook)  # a detached DDP has it too, and DDP rounds otherwise
    for trainer in (detached, plain):  # the first step of a DDP has other buckets
        trainer.step()
    for tensor in module.state_dict().values():  # DDP broadcasts rank 0's weights only in its constructor
        dist.broadcast(tensor, group_src=0, group=rank.group)
    plain.module.load_state_dict(module.state_dict())
    for step in range(2):
        expected, weights = plain.step(), detached.step()
        rank.expect_same(f"weights after step {step} of plain DDP after the attachment", weights, expected)


class _Left(Exception):
    """The loop fails."""


def _check_leave(rank: _Rank) -> None:
    """An exception of the loop ends the attachment on all ranks. They can attach again, or go on with plain DDP."""
    trainer = rank.new_trainer()
    with suppress(_Left), trainer.attach():
        trainer.step()
        rank.raise_on_all_ranks("")  # no rank leaves while another one still trains
        raise _Left
    with trainer.attach():
        trainer.step()
    _expect_plain_ddp(rank, trainer.module, trainer.ddp)


def _check_drop(rank: _Rank) -> None:
    """An attachment that nobody refers to any more ends, with its threads."""
    trainer = rank.new_trainer()
    attachment = trainer.attach()
    trainer.step()
    rank.raise_on_all_ranks("")
    del attachment, trainer
    gc.collect()


_CHECKS: tuple[Callable[[_Rank], object], ...] = (
    _check_training,
    _check_repetition,
    _check_overflow,
    _check_averaged_weights,
    _check_resume,
    _check_refused_states,
    _check_detach,
    _check_leave,
    _check_drop,
)

# The package warns if an attachment ends without `detach`.
_WITHOUT_DETACH = (_check_leave, _check_drop)
