"""Asynchronous model averaging: weights are averaged in the background, and training does not wait for other ranks.

Rank i has weights x_i, a snapshot s_i of them, and differences d_i to add. Its training thread repeats a step, and its
lane repeats a round together with those of all n ranks (AD-PSGD, arXiv 1710.06952; Bagua, arXiv 2107.01499):

    step:   x_i -= gamma g_i(x_i)             # the optimizer, at this rank's own speed
            x_i += d_i;  d_i = 0
            if asked:  s_i = x_i
    round:  sleep for the interval
            ask for s_i, and wait for about the duration of a step
            vote; end if all ranks have stopped or a rank leaves
            m = 1/n sum_j s_j                 # or this rank's estimate, see `CompressedMean`
            d_i += m - s_i;  s_i += m - s_i

Only the training thread reads and writes the module. It owns d_i, and s_i while it is asked; the lane owns m, and s_i
otherwise. A rank that does not answer, because it evaluates, sends its last snapshot again, with the rounds since.

A snapshot from before a load of weights never changes the loaded weights. While ranks have seen different numbers of
loads, nothing is averaged. If they differ for longer than the timeout, all ranks raise.
"""

import math
import weakref
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

import torch

from torchbagua import _concurrency
from torchbagua._warnings import warn_user
from torchbagua.algorithms.base import check_at_least, check_codecs, register
from torchbagua.algorithms.weights.rounds import ModelAveragingAlgorithm
from torchbagua.codecs.base import Compressor, Identity, by_name, needs_feedback
from torchbagua.collectives.agreement import agree, all_reduce_max, name_ranks, ranks_by_value
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.native.ops import ELEMENT_TYPES
from torchbagua.observe.events import Details
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.lockstep import LoadMark, require_same_loads, require_same_numbers
from torchbagua.runtime.parameters import LayoutWatch, local_shard
from torchbagua.runtime.rank_state import check_rank_state, owner_of
from torchbagua.runtime.sub_buckets import sub_bucket_of
from torchbagua.runtime.weight_buckets import DIFFERENCE, SNAPSHOT, WeightBucket, WeightBuckets
from torchbagua.runtime.weight_runner import WeightImpl, WeightRunner
from torchbagua.transport.communicator import Communicator
from torchbagua.transport.errors import BUSY_ADVICE, CommunicationError
from torchbagua.transport.streams import StreamHandoff

# How long the lane waits for a snapshot before the rank's first step, while the duration of a step is not yet known.
_FIRST_PATIENCE_S = 0.1

_STATE_KEYS = ("step", "has_differences", "differences", "buffer_snapshots", "is_enabled")


@dataclass(frozen=True)
class AsyncModelAverageAlgorithm(ModelAveragingAlgorithm):
    """Each rank trains at its own speed, and a background thread averages the weights of all ranks.

    In each round, the mean of snapshots of all ranks' weights is computed. Then, between two steps, x += mean -
    snapshot. So each rank preserves the updates that it has made meanwhile, and ranks may take different numbers of
    steps (AD-PSGD, Lian et al., arXiv 1710.06952; Bagua, arXiv 2107.01499). In each round, a rank sends 8 (n-1)/n bytes
    per float32 parameter.

    After the warm-up, training waits for the network only in `abort`, `resume`, `load_state_dict` and detach, and when
    layers are unfrozen. Rounds continue until you detach or the process ends.

    With `compression`, ranks send the differences between their weights and the last mean, except in the first round
    after attach, `resume` or `averaged_weights`, in the last round, for buffers and in the warm-up. It takes 16 bytes
    per parameter, plus 8 bytes per parameter divided by the number of ranks.

    A state can be loaded with other arguments, with two exceptions: another `average_buffers`, and a longer warm-up if
    the state is already past its warm-up, because ranks with different weights would then average gradients.

    Args:
        peer_selection_mode: must be "all".
        sync_interval_ms: the pause between two rounds, in milliseconds.
        warmup_steps: the number of training steps before the first round. During these steps, gradients are averaged
            over all ranks in full precision. It counts the steps that the optimizer takes: accumulated backward passes
            are one step, and a step that GradScaler skips is not counted.
        compression: the codec for the differences: its name (see `torchbagua.codecs`) or a Compressor, which may be
            your own. A codec that needs error feedback is refused, because its residuals of the mean are large and are
            lost when the rounds end. None sends weights in full precision.
        average_buffers, final_average, bucket_cap_mb: see `ModelAveragingAlgorithm`.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    peer_selection_mode: str = "all"
    sync_interval_ms: int = 500
    warmup_steps: int = 0
    _: KW_ONLY
    compression: str | Compressor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.peer_selection_mode != "all":
            raise ValueError(
                f"AsyncModelAverageAlgorithm: peer_selection_mode must be 'all', got {self.peer_selection_mode!r}"
            )
        check_at_least(self, "sync_interval_ms", 0)
        check_at_least(self, "warmup_steps", 0)
        check_codecs(self, "compression")
        if needs_feedback(self.compression):
            raise ValueError(
                "AsyncModelAverageAlgorithm: compression must not be a codec that needs error feedback, because its "
                f"large residuals of the mean are lost when the rounds end; got {self.compression!r}"
            )

    def prepare(self) -> None:
        if self.compression is not None:  # full precision needs no kernels
            super().prepare()

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        return {**super().state_arguments(process_group), "warmup_steps": self.warmup_steps}

    def check_state(self, saved: Mapping[str, Any], state: Mapping[str, Any], process_group: BaguaProcessGroup) -> None:
        num_warm = saved.get("warmup_steps", self.warmup_steps)
        if state.get("step", 0) >= num_warm < self.warmup_steps:
            raise ValueError(
                f"{type(self).__name__}: the state is past a warm-up of warmup_steps={num_warm}, but the attached "
                f"algorithm has warmup_steps={self.warmup_steps}; attach with at most {num_warm}"
            )
        super().check_state({**saved, "warmup_steps": self.warmup_steps}, state, process_group)

    def make_codec(self) -> Compressor:
        return by_name(self.compression)

    def make_impl(self, runner: WeightRunner) -> "AsyncModelAverageAlgorithmImpl":
        timeout_s = runner.process_group.timeout.total_seconds()
        if self.sync_interval_ms > 500 * timeout_s:
            raise ValueError(
                f"AsyncModelAverageAlgorithm: sync_interval_ms must be at most half the timeout of attach or of the "
                f"group, {timeout_s:g} s, got {self.sync_interval_ms}"
            )
        return AsyncModelAverageAlgorithmImpl(runner)


class AsyncModelAverageAlgorithmImpl(WeightImpl):
    """The `Attachment.impl` while `AsyncModelAverageAlgorithm` is attached. It stops and resumes averaging.

    Attributes:
        step: training steps so far.
    """

    algorithm: AsyncModelAverageAlgorithm

    def __init__(self, runner: WeightRunner) -> None:
        super().__init__(runner)
        self.step = 0
        self._weights: WeightBuckets = self.algorithm.make_weights(
            self.runner,
            self._progress,
            skips_alone=True,
            replicas_diverge=lambda: self.mode == "running" and self._weights.has_final_mean,
        )
        self._compressed_means: dict[WeightBucket, CompressedMean] = {}
        self._is_single_rank = runner.process_group.size == 1
        self._is_enabled = True
        self._leaving_rank: int | None = None
        self._rounds: BackgroundRounds | None = None
        self._num_rounds_before = 0
        self._num_calls = 0
        self._has_averaged_gradients = False  # since the last step

    @property
    def mode(self) -> Literal["warm-up", "running", "stopped", "ended"]:
        """What is averaged: gradients in "warm-up", weights while "running", nothing when "stopped" or "ended".

        `abort` stops averaging and `resume` restarts it. During the warm-up, they determine the mode that follows it.
        "ended" means that a rank has left. It is final.
        """
        if self._leaving_rank is not None:
            return "ended"
        if self.step < self.algorithm.warmup_steps:
            return "warm-up"
        return "running" if self._is_enabled else "stopped"

    @property
    def num_rounds(self) -> int:
        """The number of rounds that have finished since `attach`."""
        return self._num_rounds_before + (0 if self._rounds is None else self._rounds.num_rounds)

    def abort(self, module: torch.nn.Module | Sequence[torch.nn.Module], final_average: bool | None = None) -> None:
        """Stop averaging. From then on, each rank trains independently. Collective.

        Rounds continue until all ranks have called it. Does nothing if averaging is already stopped.

        Args:
            module: the module, or the list of modules, that you attached.
            final_average: set the weights of all ranks to their mean. By default, the algorithm's `final_average`.

        Raises:
            ValueError: the algorithm is not attached to `module`.
            RuntimeError: communication failed.
        """
        self._check_attached("abort", module)
        if self._is_enabled and self._leaving_rank is None:
            self._is_enabled = False
            self._num_calls += 1
            if not self._stop("abort", self.algorithm.final_average if final_average is None else final_average):
                self._meet("abort")
            self.runner.tracer.deliver()

    def resume(self, module: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
        """Restart averaging after `abort`. Collective. Does nothing if averaging is not stopped.

        Args:
            module: the module, or the list of modules, that you attached.

        Raises:
            ValueError: the algorithm is not attached to `module`.
            RuntimeError: a rank has left, or communication failed.
        """
        self._check_attached("resume", module)
        if self._leaving_rank is not None:
            raise RuntimeError(f"torchbagua: averaging cannot be resumed: rank {self._leaving_rank} has left")
        if not self._is_enabled:
            self._num_calls += 1
            self._meet("resume")
            self._is_enabled = True
            self._start()

    def _check_attached(self, method: str, module: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
        if not self.runner.is_attached_to(module):
            raise ValueError(
                f"AsyncModelAverageAlgorithmImpl.{method}: module must be the module that the algorithm is attached "
                f"to, got another module, {type(module).__name__}"
            )

    def _meet(self, purpose: str) -> None:
        """Wait until all ranks have called this, while no rounds are running."""
        if not self._is_single_rank:
            self._weights.lockstep.submit(lambda: None, purpose).result()

    def _progress(self) -> dict[str, int]:
        return {
            "optimizer steps of the warm-up": min(self.step, self.algorithm.warmup_steps),
            "calls of abort and resume": self._num_calls,
            "running series of rounds": int(self.mode == "running"),
        }

    def need_reset(self) -> bool:
        # In the warm-up, ranks synchronize at each step. Rounds refuse a changed layout at the next vote.
        return self._weights.need_reset(meets=self.mode == "warm-up")

    def reset(self) -> None:
        was_running = self._stop("new buckets")
        self._compressed_means.clear()
        super().reset()
        if was_running:
            self._start()

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        assert isinstance(bucket, WeightBucket)
        bucket.append_asynchronous_model_average_op(self.algorithm.peer_selection_mode, snapshot=bucket.snapshot)
        codec = self.runner.codec_for(bucket)
        # Buffers are not compressed: a small variance next to a large one would be lost in 8 bits.
        if not isinstance(codec, Identity) and bucket.flat.dtype in ELEMENT_TYPES and not bucket.are_buffers:
            self._compressed_means[bucket] = CompressedMean(bucket, codec)

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self._average_gradients

    def _average_gradients(self) -> None:
        """In the warm-up, replace gradients by their means: missing ones count as zero, unless no rank has them."""
        if self._is_single_rank or self.mode != "warm-up":
            return
        self.runner.reset_if_needed()  # a layer may have been unfrozen or replaced since the last step
        world = self.runner.process_group.world
        buckets = [bucket for bucket in self._weights if not bucket.are_buffers]
        has_gradient = []
        for tensor, part in (member for bucket in buckets for member in bucket.views(bucket.snapshot)):
            gradient = tensor.parameter.grad
            part.zero_() if gradient is None else part.copy_(local_shard(gradient))
            has_gradient.append(int(gradient is not None))

        def average() -> list[int]:
            used = all_reduce_max(world, has_gradient, "the gradients")
            for bucket in buckets:
                bucket.run()
            return used

        all_used = self._weights.lockstep.submit(average, "the gradients").finish()
        means = [member for bucket in buckets for member in bucket.views(bucket.flat)]
        for (tensor, part), is_used in zip(means, all_used, strict=True):
            if not is_used:
                continue
            if tensor.parameter.grad is None:
                tensor.parameter.grad = torch.zeros_like(tensor.parameter)
            local_shard(tensor.parameter.grad).copy_(part)
        self._has_averaged_gradients = True

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        self._start()
        return self._after_step

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.mode == "warm-up" and not self._is_single_rank:
            if not self._has_averaged_gradients:
                raise RuntimeError(
                    "torchbagua: a warm-up step without averaged gradients: no backward pass started from an output of "
                    "the attached module; set warmup_steps=0 if backward runs within that module's forward, as with "
                    "Lightning's manual optimization"
                )
            self._has_averaged_gradients = False
        self.step += 1
        if self._rounds is None:
            self._start()
        elif self._rounds.after_step():
            self._end(self._rounds)

    def _start(self) -> None:
        if self.mode == "running" and self._rounds is None and not self._is_single_rank:
            self._rounds = BackgroundRounds(self.runner, self._weights, self._compressed_means)

    def _stop(self, reason: str, with_mean: bool = False) -> bool:
        """If rounds are running, stop them together with all ranks. Return whether they were running."""
        if (rounds := self._rounds) is None:
            return False
        rounds.stop(reason, with_mean, self.runner.loading)
        self._end(rounds)
        return True

    def _end(self, rounds: "BackgroundRounds") -> None:
        self._num_rounds_before, self._rounds = self.num_rounds, None
        self._leaving_rank = rounds.leaving_rank
        if self._leaving_rank is not None:
            self.runner.note_lost_ranks()
            warn_user(
                f"torchbagua: rank {self._leaving_rank} has left the training: asynchronous averaging has ended, and "
                "this rank continues to train alone"
            )

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Drop differences to snapshots from before the load. Averaging pauses until all ranks have loaded."""
        super().weights_loaded(values)
        if self._rounds is not None:
            self._rounds.weights_loaded(values.keys(), self._weights.lockstep.loads.mark)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within the context, stop averaging and give all ranks the mean of their weights. Collective."""
        was_running = self._stop("averaged_weights")
        if self._leaving_rank is not None:
            raise RuntimeError(f"torchbagua: weights cannot be averaged: rank {self._leaving_rank} has left")
        with super().averaged_weights():
            yield
        # Do not restart if an exception ends the context: other ranks may still be in their contexts, and a round would
        # wait for them. If training continues nevertheless, rounds restart with the next step.
        if was_running:
            self._start()

    def forget_in_flight(self) -> None:
        self._rounds = None

    def finish(self) -> bool:
        """Stop averaging together with all ranks, as `abort` does."""
        rounds = self._rounds
        if rounds is None:
            return self._leaving_rank is None and super().finish()
        with self.runner.tracer.span("detach"):
            self._stop("detach", self.algorithm.final_average)
        return rounds.has_mean

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two steps. A round in flight continues and is not part of it until it has ended."""
        weights = self._weights
        pending = None if self._rounds is None else self._rounds.pending()
        differences, snapshots = pending or (weights.by_name(_zeros), weights.by_name(_zeros, weights.of_buffers))
        return {
            **owner_of(self.runner.process_group),
            "step": self.step,
            "has_differences": pending is not None,
            "differences": differences,
            "buffer_snapshots": snapshots,
            "is_enabled": self._is_enabled,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state whose weights have been loaded. Collective: running rounds stop and restart."""
        check_rank_state(self.runner.name, state, _STATE_KEYS, self.runner.process_group)
        weights = self._weights
        differences = {bucket: _zeros(bucket) for bucket in weights}
        snapshots = {bucket: _zeros(bucket) for bucket in weights.of_buffers}
        if 1 not in (self.runner.process_group.size, state["num_ranks"]):  # a single rank has no differences
            weights.load_by_name(differences.__getitem__, state["differences"])
            weights.load_by_name(snapshots.__getitem__, state["buffer_snapshots"], weights.of_buffers)
        if self._rounds is not None:
            loaded = weights.copy()
            self._stop("load_state_dict")
            weights.write(loaded.__getitem__)
        for compressed_mean in self._compressed_means.values():
            compressed_mean.forget(state["differences"])
        weights.lockstep.loads.forget()
        self.step = state["step"]
        self._is_enabled = state["is_enabled"]
        if state["has_differences"]:
            weights.add(differences.__getitem__, snapshots.__getitem__)
        self._start()


def _zeros(bucket: WeightBucket) -> torch.Tensor:
    return torch.zeros_like(bucket.flat)


class CompressedMean:
    """Averages the snapshots s_i of one bucket by their differences from a mean c, bitwise equal on all ranks.

    1. e_i = s_i - c;
    2. D = Q(mean_j Q(e_j) + E) with the codec Q, and E becomes the residual of the second encoding;
    3. c += D; rank i estimates the mean as c + (e_i - Q(e_i)).

    The residual of e_i stays in the weights of rank i (Qsparse-local-SGD, arXiv 1906.02367, stores it separately).
    """

    def __init__(self, bucket: WeightBucket, codec: Compressor) -> None:
        self._bucket = bucket
        self._residuals = TwoPhaseResiduals(bucket.flat.device)
        self._differences = sub_bucket_of(bucket, bucket.tensors, torch.float32)
        self._differences.append_centralized_synchronous_op(
            hierarchical=False, compression=codec, error_feedback=self._residuals
        )
        self._mean = torch.zeros_like(self._differences.flat)

    def forget(self, names: Container[str]) -> None:
        """Reset E of these weights, which were loaded and need no correction. Do not call it during `average`."""
        self._residuals.clear(self._bucket.slices_of(names))

    def average(self, loaded: Container[str], *, is_exact: bool) -> None:
        """Write the exact mean of the snapshots, which becomes c, or this rank's estimate to the flat tensor."""
        self.forget(loaded)
        bucket = self._bucket
        if is_exact:
            bucket.run()
            self._mean.copy_(bucket.flat)
            return
        torch.sub(bucket.snapshot, self._mean, out=self._differences.flat)
        self._mean.add_(self._differences.run())
        self._residuals.mean.commit()  # the first phase's residual is not committed: it stays in the weights
        torch.add(self._mean, self._residuals.sent.staged(slice(None)), out=bucket.flat)


@dataclass(frozen=True)
class Vote(LoadMark):
    """The record of a rank before a round: the loads before its snapshot, and whether the rounds may end."""

    leaves: bool = False  # ends the rounds of all ranks at once
    reason: str | None = None  # the call for which the rank's weights have stopped changing; None while they change
    wants_mean: bool = False  # a last mean, when all ranks have stopped
    gives_up: bool = False  # has waited too long for ranks with another number of loads
    changed_parameter: int = 0  # see `LayoutWatch`


def count_votes(
    communicator: Communicator, own: Vote, watch: LayoutWatch, purpose: str
) -> tuple[int | None, int | None, bool, list[Vote]]:
    """Return a rank that leaves, one that has not stopped, whether all get a last mean, and all votes. Collective.

    All ranks raise if they have stopped for different reasons, if a layout has changed, or if their loads differ in the
    end or for too long.
    """
    votes = agree(communicator, replace(own, changed_parameter=watch.changed_parameter), purpose)
    watch.check([vote.changed_parameter for vote in votes])
    leaving_rank = max((rank for rank, vote in enumerate(votes) if vote.leaves), default=None)
    running_rank = max((rank for rank, vote in enumerate(votes) if vote.reason is None), default=None)
    ends = leaving_rank is None and running_rank is None
    if leaving_rank is None and (ends or any(vote.gives_up for vote in votes)):
        require_same_numbers(communicator, [vote.num_loads for vote in votes])
    reasons = ranks_by_value([vote.reason for vote in votes], communicator.ranks)
    if ends and len(reasons) > 1:
        seen = ", ".join(f"{name_ranks(ranks)} for {reason}" for reason, ranks in reasons)
        raise CommunicationError(f"torchbagua: ranks have stopped averaging for different reasons: {seen}")
    return leaving_rank, running_rank, ends and any(vote.wants_mean for vote in votes), votes


class BackgroundRounds:
    """A series of rounds on the lane, until all ranks have stopped or a rank leaves.

    The lane references the rounds, so they must not reference the module: when it is unreferenced, the lane ends.
    """

    def __init__(
        self, runner: WeightRunner, weights: WeightBuckets, means: Mapping[WeightBucket, CompressedMean]
    ) -> None:
        self.num_rounds = 0  # finished so far
        # The result of the last votes: how the rounds have ended, when they have.
        self.leaving_rank: int | None = None
        self.has_mean = False  # all ranks have a last mean in their buckets
        self._running_rank: int | None = None  # a rank that had not stopped
        self._group = runner.process_group
        self._weights: WeightBuckets = weakref.proxy(weights)  # used by the training thread only
        self._layout_watch = weights.lockstep.layout_watch
        self._buckets = list(weights)
        self._compressed_means = means
        self._interval_s = runner.algorithm.sync_interval_ms / 1000
        self._timeout_s = runner.process_group.timeout.total_seconds()
        self._device = self._buckets[0].flat.device if self._buckets else torch.device("cpu")
        self._handoff = StreamHandoff(self._device)
        self._check_process = runner.lane.check_process
        # The lane alone uses these.
        self._num_averaged_loads = 0
        self._gives_up_at_s = math.inf  # finite while ranks have seen different numbers of loads
        self._changed = _concurrency.Condition()  # guards everything below
        self._phase: Literal["pause", "asked", "ready", "averaging", "over"] = "pause"
        self._vote = Vote(**vars(weights.lockstep.loads.mark))
        self._loaded: set[str] = set()  # names of weights
        self._loaded_since_snapshot: set[str] = set()
        self._snapshot_vote, self._snapshot_step = self._vote, 0  # at the last snapshot
        # While differences are not applied: the step of the snapshot that was subtracted, and that snapshot of buffers.
        self._pending: tuple[int, Mapping[WeightBucket, torch.Tensor]] | None = None
        self._num_steps = 0
        self._step_s, self._last_step_at_s = 0.0, _concurrency.monotonic()
        weights.read(SNAPSHOT)
        for bucket in self._buckets:
            bucket.difference.zero_()  # creates the tensor here, and therefore on this thread's stream
        self._handoff.record()
        compare_progress = weights.lockstep.comparison("the first of the averaging rounds")
        self._job = runner.lane.submit(lambda: self._run(compare_progress), interrupt=self.leave)

    # Called by the training thread.

    def after_step(self) -> bool:
        """Apply pending differences, and take a snapshot if the lane asks. Return whether the rounds have ended."""
        self._check_process()  # in a forked process, the lane may have held the lock
        with self._changed:
            now_s = _concurrency.monotonic()
            self._step_s, self._last_step_at_s = now_s - self._last_step_at_s, now_s
            self._num_steps += 1
            self._apply_and_snapshot()
        if has_ended := self._job.is_done():
            self._job.result()
        return has_ended

    def weights_loaded(self, names: Collection[str], loads: LoadMark) -> None:
        """Drop the differences of loaded weights to snapshots from before the load."""
        with self._changed:
            self._vote = replace(self._vote, **vars(loads))
            self._loaded.update(names)
            self._loaded_since_snapshot.update(names)
            if self._pending is not None:
                self._handoff.wait()
                for bucket in self._buckets:
                    bucket.clear(bucket.difference, names)
                self._handoff.record()

    def stop(self, reason: str, with_mean: bool, loading: Collection[str]) -> None:
        """Continue the rounds until all ranks have called this. Write a last mean if any rank wants it."""
        self._check_process()
        if loading:  # so that ranks that have not loaded do not change the loaded weights until all have stopped
            self.weights_loaded(loading, self._vote.with_pending())
        with self._group.tracer.span("wait"), self._changed:
            self._vote = replace(self._vote, reason=reason, wants_mean=with_mean)
            self._changed.notify_all()
            late_at_s = _concurrency.monotonic() + self._timeout_s
            while self._phase != "over" and not self._job.is_done():  # on a failed lane, the job is done at once
                # With a timeout, because a lane that fails before it starts the rounds does not notify.
                self._changed.wait_for(lambda: self._phase in ("asked", "over"), timeout=1.0)
                self._apply_and_snapshot()
                if _concurrency.monotonic() > late_at_s and self._running_rank is not None:
                    late_at_s = math.inf
                    waited = (
                        f"torchbagua: {reason} has waited longer than the timeout of {self._timeout_s:g} s for rank "
                        f"{self._running_rank}"
                    )
                    if reason == "averaged_weights":  # in other calls, a rank may train for long after others
                        self._vote = replace(self._vote, reason=None)
                        raise CommunicationError(f"{waited}; all ranks must enter it: {BUSY_ADVICE}")
                    warn_user(f"{waited}, which still participates in averaging because it is training or blocked")
            self._apply_and_snapshot()
        self._job.finish()
        if self.has_mean:
            self._weights.write()

    def leave(self) -> None:
        """End the rounds of all ranks, without waiting for their end."""
        with self._changed:
            self._vote = replace(self._vote, leaves=True)
            self._changed.notify_all()

    def pending(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
        """Return the differences that are not yet applied, and the snapshots of buffers, both by name; or None."""
        with self._changed:
            if self._pending is None:
                return None
            _, buffers = self._pending
            self._handoff.wait()
            copies = self._weights.by_name(DIFFERENCE), self._weights.by_name(buffers.__getitem__, buffers)
            self._handoff.record()
            return copies

    def _apply_and_snapshot(self) -> None:
        """Apply pending differences to the weights, and take a snapshot if the lane has asked for one."""
        self._handoff.wait()
        if self._pending is not None:
            step, buffers = self._pending
            self._weights.add(DIFFERENCE, buffers.__getitem__)
            self._pending = None
            now_ns = _concurrency.perf_counter_ns()
            values = {"rounds": self.num_rounds, "staleness in steps": self._num_steps - step}
            self._group.tracer.tell("apply", now_ns, now_ns, Details(values=values))
        if self._phase == "asked":
            self._weights.read(SNAPSHOT)
            self._snapshot_vote, self._snapshot_step = self._vote, self._num_steps
            self._loaded_since_snapshot.clear()
            self._phase = "ready"
            self._changed.notify_all()
        self._handoff.record()

    # Called by the lane.

    def _run(self, compare_progress: Callable[[], object]) -> None:
        world, ends = self._group.world, False
        try:
            compare_progress()
            while not ends:
                self._await_snapshot()
                # A vote to stop counts from the rank's last snapshot on; a vote to leave counts at once.
                gives_up = _concurrency.monotonic() > self._gives_up_at_s
                own = replace(self._snapshot_vote, leaves=self._vote.leaves, gives_up=gives_up)
                self.leaving_rank, self._running_rank, self.has_mean, votes = count_votes(
                    world, own, self._layout_watch, f"averaging round {self.num_rounds}"
                )
                ends = self.leaving_rank is not None or self._running_rank is None
                if len({vote.num_loads for vote in votes}) > 1:
                    self._gives_up_at_s = min(self._gives_up_at_s, _concurrency.monotonic() + self._timeout_s)
                    continue
                self._gives_up_at_s = math.inf
                if not ends or self.has_mean:
                    self._average(votes, is_last=ends)
                if not ends:
                    self._publish_differences()
        finally:
            with self._changed:
                self._phase = "over"
                self._changed.notify_all()

    def _await_snapshot(self) -> None:
        with self._changed:
            # 1. Wait for the interval, unless this rank stops.
            self._phase = "pause"
            self._wait(self._interval_s, lambda: self._vote.reason is not None)
            self._handoff.record()
            # 2. Wait for a snapshot, or until this rank stops. A training rank answers within a step. If it does not
            # answer by then, for example because it evaluates, its last snapshot is sent again. Meanwhile, the other
            # ranks wait for this rank on the network.
            self._phase = "asked"
            self._changed.notify_all()
            patience_s = min(max(self._interval_s, 2 * self._step_s, _FIRST_PATIENCE_S), self._timeout_s / 4)
            self._wait(patience_s, lambda: self._phase == "ready" or self._vote.reason is not None)
            # 3. A rank that stops must answer, and does so at once: its last snapshot is its last weights.
            self._wait(self._timeout_s / 4, lambda: self._phase == "ready" or self._vote.reason is None)
            self._phase = "averaging"
            self._handoff.wait()

    def _average(self, votes: Sequence[Vote], *, is_last: bool) -> None:
        """Write the last mean, or mean minus snapshot, to the flat tensors."""
        loaded: frozenset[str] = frozenset()
        if votes[0].num_loads != self._num_averaged_loads:
            with self._changed:
                loaded = frozenset(self._loaded)
            require_same_loads(self._group.world, votes)
            self._num_averaged_loads = votes[0].num_loads
        is_exact = is_last or self.num_rounds == 0 or bool(loaded)
        for bucket in self._buckets:
            if bucket in self._compressed_means:
                self._compressed_means[bucket].average(loaded, is_exact=is_exact)
            else:
                bucket.run()
            if not is_last:
                bucket.subtract(bucket.flat, bucket.snapshot, out=bucket.flat)  # while it is in the caches
        self.num_rounds += 1

    def _publish_differences(self) -> None:
        """Pass the flat tensors, which contain mean minus snapshot, to the training thread."""
        buffers = {bucket: bucket.snapshot.clone() for bucket in self._buckets if bucket.are_buffers}
        for bucket in self._buckets:  # a rank that does not answer sends it again
            bucket.snapshot.add_(bucket.flat)
        # So that the training thread does not wait for the network when it applies the differences.
        self._group.private.wait_for_gpu(self._device, f"averaging round {self.num_rounds}")
        with self._changed:
            self._handoff.wait()
            for bucket in self._buckets:
                bucket.clear(bucket.flat, self._loaded_since_snapshot)
                if self._pending is None:
                    bucket.swap_difference()
                else:  # the training thread has not applied the differences of the previous round
                    bucket.difference.add_(bucket.flat)
            self._pending = self._pending or (self._snapshot_step, buffers)
            self._handoff.record()

    def _wait(self, timeout_s: float, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done()`, until the rank leaves, or at most `timeout_s`."""
        deadline_s = _concurrency.monotonic() + timeout_s
        while not (is_done() or self._vote.leaves) and (remaining_s := deadline_s - _concurrency.monotonic()) > 0:
            self._changed.wait(remaining_s)


register("async", AsyncModelAverageAlgorithm, "weights averaged in the background, without blocking training")
