"""Asynchronous model averaging: training waits for nobody, and weights are averaged in the background."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch

from torchbagua._warnings import warn_user
from torchbagua.algorithms.base import check_at_least, check_codecs, register
from torchbagua.algorithms.weights.averaging import ModelAveragingAlgorithm
from torchbagua.algorithms.weights.background_rounds import BackgroundRounds, MonotonicWaitClock, WaitClock
from torchbagua.algorithms.weights.compressed_rounds import SnapshotMeans
from torchbagua.algorithms.weights.gradient_warm_up import GradientWarmUp
from torchbagua.algorithms.weights.pending_state import load_pending_state, pending_state
from torchbagua.algorithms.weights.votes import Outcome, Reason
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.lookup import by_name, needs_feedback
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.native.ops import ELEMENT_TYPES
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.impl import AlgorithmImpl
from torchbagua.runtime.runner import Runner
from torchbagua.runtime.weight_bucket import WeightBucket

Mode = Literal["warm-up", "running", "stopped", "ended"]


@dataclass(frozen=True)
class AsyncModelAverageAlgorithm(ModelAveragingAlgorithm):
    """Every rank trains at its own speed, and a background thread averages the weights of all ranks.

    In each round, every rank takes a snapshot of its weights between two steps, and the mean of the snapshots is
    formed. Then, again between two steps, x += mean - snapshot. So no rank loses what it has learnt meanwhile, and
    ranks may take different numbers of steps (AD-PSGD, Lian et al., arXiv 1710.06952; Bagua, arXiv 2107.01499). In each
    round a rank sends 8 (n-1)/n bytes a float32 parameter.

    After the warm-up, training waits for the network only in `abort`, `resume`, `load_state_dict` and detach, and when
    layers are unfrozen. Rounds go on until you detach or the process ends, even if your script keeps no reference to
    the module and the attachment.

    With `compression`, ranks send how their weights differ from the last mean. What a codec leaves out of it stays in a
    rank's own weights until a later round. The first round after attach, `resume` or `averaged_weights`, and the last,
    are in full precision, and so are buffers and the warm-up. It takes 16 bytes a parameter, and 8 divided by the
    number of ranks.

    A state can be loaded under other arguments, with two exceptions: another `average_buffers`, and a longer warm-up
    than the one that the state is past. Ranks whose weights differ would then average gradients.

    Args:
        peer_selection_mode: "all"; there is no other.
        sync_interval_ms: pause between two rounds, in milliseconds.
        warmup_steps: how many training steps come before the first round. In these, gradients are averaged over all
            ranks in full precision. It counts the steps that the optimizer takes: accumulated backward passes are one
            step, and a step that GradScaler skips is none.
        compression: the codec that sends differences: its name, see `torchbagua.codecs`, or a Compressor, which may be
            one of yours. One that needs error feedback is refused: it leaves so much out of a mean that rounds which
            end would lose much. None sends weights in full precision.
        average_buffers, final_average, bucket_cap_mb: see `ModelAveragingAlgorithm`.

    Raises:
        TypeError, ValueError: an argument does not fit.
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
                "AsyncModelAverageAlgorithm: compression must not be one that needs error feedback: it leaves so much "
                f"out of a mean that rounds which end would lose much; got {self.compression!r}"
            )

    def prepare(self) -> None:
        """Load the native kernels, if there is a codec: full precision needs none."""
        if self.compression is not None:
            super().prepare()

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `average_buffers` and `warmup_steps`."""
        return {**super().state_arguments(process_group), "warmup_steps": self.warmup_steps}

    def check_state(self, saved: Mapping[str, Any], state: Mapping[str, Any], process_group: BaguaProcessGroup) -> None:
        """Raise ValueError for another `average_buffers`, or a warm-up that would begin again."""
        num_warm = saved.get("warmup_steps", self.warmup_steps)
        if state.get("step", 0) >= num_warm < self.warmup_steps:
            raise ValueError(
                f"{type(self).__name__}: the state is past a warm-up of warmup_steps={num_warm}, attached is "
                f"warmup_steps={self.warmup_steps}; attach with at most {num_warm}"
            )
        super().check_state({**saved, "warmup_steps": self.warmup_steps}, state, process_group)

    def make_codec(self) -> Compressor:
        return by_name(self.compression)

    def make_impl(self, runner: Runner) -> "AsyncModelAverageAlgorithmImpl":
        """Return the impl.

        Raises:
            ValueError: ranks would wait for each other's next round longer than half the group's timeout.
        """
        timeout_s = runner.process_group.timeout.total_seconds()
        if self.sync_interval_ms > 500 * timeout_s:
            raise ValueError(
                f"AsyncModelAverageAlgorithm: sync_interval_ms must be at most half the timeout of attach or of the "
                f"group, {timeout_s:g} s, got {self.sync_interval_ms}"
            )
        return AsyncModelAverageAlgorithmImpl(runner)


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl):
    """What `Attachment.impl` is while `AsyncModelAverageAlgorithm` is attached; it stops and resumes averaging.

    Attributes:
        step: training steps so far.
        clock: measures the interval.
    """

    algorithm: AsyncModelAverageAlgorithm

    def __init__(self, runner: Runner, *, clock: WaitClock | None = None) -> None:
        super().__init__(runner)
        self.step = 0
        self.clock = clock or MonotonicWaitClock()
        self._weights = self.algorithm.make_weights(runner, self._progress)
        self._warm_up = GradientWarmUp(self._weights, runner.process_group)
        self._means = SnapshotMeans()
        self._is_single_rank = runner.process_group.size == 1
        self._is_enabled = True
        self._leaving_rank: int | None = None
        self._rounds: BackgroundRounds | None = None
        self._num_rounds_before = 0
        self._num_calls = 0
        runner.needs_grad_scaler, runner.agree_on_overflow = False, bool  # each rank skips alone
        runner.replicas_diverge = lambda: self.mode == "running" and self._weights.has_final_mean

    @property
    def mode(self) -> Mode:
        """What is averaged: gradients in "warm-up", weights while "running", nothing when "stopped" or "ended".

        `abort` stops averaging and `resume` starts it again; during warm-up they decide what comes after it. "ended"
        means that a rank has left, and is final.
        """
        if self._leaving_rank is not None:
            return "ended"
        if self.step < self.algorithm.warmup_steps:
            return "warm-up"
        return "running" if self._is_enabled else "stopped"

    @property
    def num_rounds(self) -> int:
        """How many rounds have finished since `attach`."""
        return self._num_rounds_before + (0 if self._rounds is None else self._rounds.num_rounds)

    def abort(self, module: torch.nn.Module, final_average: bool | None = None) -> None:
        """Stop averaging; from then on every rank trains alone. Collective.

        Rounds go on until all ranks have called it. Does nothing if averaging is stopped already.

        Args:
            module: the module that you attached.
            final_average: give all ranks the mean of their weights; by default as the algorithm was constructed.

        Raises:
            ValueError: the algorithm is not attached to `module`.
            RuntimeError: communication failed.
        """
        self._check_attached("abort", module)
        if not self._is_enabled or self._leaving_rank is not None:
            return
        self._is_enabled = False
        self._num_calls += 1
        if self._rounds is not None:
            self._stop("abort", self.algorithm.final_average if final_average is None else final_average)
        else:
            self._meet("abort")
        self.runner.tracer.deliver()

    def resume(self, module: torch.nn.Module) -> None:
        """Start averaging again after `abort`. Collective. Does nothing if averaging is not stopped.

        Args:
            module: the module that you attached.

        Raises:
            ValueError: the algorithm is not attached to `module`.
            RuntimeError: a rank has left, or communication failed.
        """
        self._check_attached("resume", module)
        if self._leaving_rank is not None:
            raise RuntimeError(f"torchbagua: averaging cannot be resumed: rank {self._leaving_rank} has left")
        if self._is_enabled:
            return
        self._num_calls += 1
        self._meet("resume")
        self._is_enabled = True
        self._start()

    def _check_attached(self, method: str, module: torch.nn.Module) -> None:
        if not self.runner.is_attached_to(module):
            raise ValueError(
                f"AsyncModelAverageAlgorithmImpl.{method}: module must be the one that the algorithm is attached to, "
                f"got {type(module).__name__}, to which it is not"
            )

    def _meet(self, purpose: str) -> None:
        """Wait until all ranks are here; while no rounds are running."""
        if not self._is_single_rank:
            self._weights.lockstep.submit(lambda: None, purpose).result()

    def need_reset(self) -> bool:
        # In warm-up ranks meet at each step. Rounds refuse a changed layout with the next vote, and without rounds
        # ranks do not meet.
        return self._weights.need_reset(meets=self.mode == "warm-up")

    def reset(self) -> None:
        """Make buckets again; rounds that are running stop for it, on all ranks."""
        was_running = self._rounds is not None
        if was_running:
            self._stop("new buckets", with_mean=False)
        self._means.clear()
        super().reset()
        if was_running:
            self._start()

    def init_operations(self, module: torch.nn.Module | None, bucket: BaguaBucket) -> None:
        assert isinstance(bucket, WeightBucket)
        bucket.append_asynchronous_model_average_op(self.algorithm.peer_selection_mode, snapshot=bucket.snapshot)
        codec = self.runner.codec_for(bucket)
        # Not buffers: a small variance beside a large one would not survive 8 bits.
        if not isinstance(codec, Identity) and bucket.flat.dtype in ELEMENT_TYPES and not bucket.are_buffers:
            self._means.compress(bucket, codec)

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self._after_backward

    def _after_backward(self) -> None:
        """Average gradients during warm-up."""
        if self._is_single_rank or self.mode != "warm-up":
            return
        self.runner.reset_if_needed()  # a layer may have been unfrozen or replaced since the last step
        self._warm_up.average_gradients()

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        """Start averaging if there is no warm-up, and return what meets the background rounds between two steps."""
        self._start()
        return self._after_step

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.mode == "warm-up" and not self._is_single_rank:
            self._warm_up.after_step()
        self.step += 1
        if self._rounds is None:
            self._start()
            return
        self._rounds.after_step()
        if (outcome := self._rounds.outcome) is not None:
            self._note_outcome(outcome)

    def _start(self) -> None:
        if self.mode == "running" and self._rounds is None and not self._is_single_rank:
            interval_s = self.algorithm.sync_interval_ms / 1000
            self._rounds = BackgroundRounds(self.runner, self._weights, self._means.average, interval_s, self.clock)

    def _stop(self, reason: Reason, with_mean: bool) -> Outcome:
        assert self._rounds is not None
        outcome = self._rounds.stop(reason, with_mean=with_mean, loading=self.runner.loading)
        self._note_outcome(outcome)
        return outcome

    def _note_outcome(self, outcome: Outcome) -> None:
        assert self._rounds is not None
        self._num_rounds_before += self._rounds.num_rounds
        self._rounds = None
        self._leaving_rank = outcome.leaving_rank
        if self._leaving_rank is not None:
            self.runner.has_lost_ranks = True
            warn_user(
                f"torchbagua: rank {self._leaving_rank} has left the training: asynchronous averaging has ended, and "
                "this rank trains alone from here on"
            )

    def _progress(self) -> dict[str, int]:
        return {
            "optimizer steps of the warm-up": min(self.step, self.algorithm.warmup_steps),
            "calls of abort and resume": self._num_calls,
            "running series of rounds": int(self.mode == "running"),
        }

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Keep the means of snapshots from before the load out of the loaded weights.

        Nothing is averaged until all ranks have loaded. They all raise if that takes longer than the timeout.
        """
        super().weights_loaded(values)
        if self._rounds is not None:
            self._rounds.weights_loaded(values.keys(), self._weights.lockstep.loads.mark)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Stop averaging, give all ranks the mean of their weights for as long as the context lasts, and go on.

        Collective: rounds go on until all ranks have come here. They begin again when all have left the block, which
        they do within the group's timeout of each other; where an exception ends the block, with the next step.

        Raises:
            RuntimeError: a rank has left, or communication failed.
        """
        was_running = self._rounds is not None
        if was_running:
            self._stop("averaged_weights", with_mean=False)
        if self._leaving_rank is not None:
            raise RuntimeError(f"torchbagua: weights cannot be averaged: rank {self._leaving_rank} has left")
        with super().averaged_weights():
            yield
        # Not where an exception ends the block: other ranks may be in theirs, and a round would wait for them. If
        # training goes on all the same, rounds begin again with the next step.
        if was_running:
            self._start()

    def finish(self) -> bool:
        """Stop averaging, with all ranks, as `abort` does."""
        if self._leaving_rank is not None:
            return False
        if self._rounds is None:
            return super().finish()
        with self.runner.tracer.span("detach"):
            return self._stop("detach", self.algorithm.final_average).has_mean

    def state_dict(self) -> dict[str, Any]:
        """Return steps so far, whether averaging goes on, and what is still to be added to the weights.

        A round in flight goes on, and is in the state of those ranks that ask when it has ended. Between `abort` and
        `resume` the states of all ranks go together.
        """
        pending = None if self._rounds is None else self._rounds.pending()
        if pending is None:
            differences, snapshots = (
                self._weights.by_name(_zeros, of) for of in (self._weights, self._weights.of_buffers)
            )
        else:
            differences, snapshots = pending
        state = pending_state(self.runner, self.step, pending is not None, differences, snapshots)
        return {**state, "is_enabled": self._is_enabled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, when the weights it goes with have been loaded.

        Collective: rounds that are running stop, without a trace in the weights, and start again.
        """
        weights = self._weights
        differences = {bucket: _zeros(bucket) for bucket in weights}
        snapshots = {bucket: _zeros(bucket) for bucket in weights.of_buffers}
        load_pending_state(self.runner, weights, state, differences.__getitem__, snapshots.__getitem__, "is_enabled")
        if self._rounds is not None:
            loaded = {bucket: _zeros(bucket) for bucket in weights}
            weights.read(loaded.__getitem__)
            self._stop("load_state_dict", with_mean=False)
            weights.write(loaded.__getitem__)
        self._means.forget()
        weights.lockstep.loads.forget()
        self.step = state["step"]
        self._is_enabled = state["is_enabled"]
        if state["has_differences"]:
            weights.add(differences.__getitem__, snapshots.__getitem__)
        self._start()


def _zeros(bucket: WeightBucket) -> torch.Tensor:
    return torch.zeros_like(bucket.flat)


register("async", AsyncModelAverageAlgorithm, "weights averaged in the background; training waits for nobody")
