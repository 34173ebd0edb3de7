"""Asynchronous model averaging: weights are averaged in the background, and training does not wait for other ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch

from torchbagua._warnings import warn_user
from torchbagua.algorithms.base import check_at_least, check_codecs, register
from torchbagua.algorithms.weights.background_rounds import BackgroundRounds, MonotonicWaitClock, WaitClock
from torchbagua.algorithms.weights.compressed_rounds import SnapshotMeans
from torchbagua.algorithms.weights.gradient_warm_up import GradientWarmUp
from torchbagua.algorithms.weights.pending_state import load_pending_state, pending_state
from torchbagua.algorithms.weights.rounds import ModelAveragingAlgorithm
from torchbagua.algorithms.weights.votes import Outcome, Reason
from torchbagua.codecs.base import Compressor
from torchbagua.codecs.cast import Identity
from torchbagua.codecs.lookup import by_name, needs_feedback
from torchbagua.collectives.process_group import BaguaProcessGroup
from torchbagua.native.ops import ELEMENT_TYPES
from torchbagua.runtime.bucket import BaguaBucket
from torchbagua.runtime.runner import AlgorithmImpl, Runner
from torchbagua.runtime.weight_buckets import WeightBucket
from torchbagua.runtime.weight_runner import WeightRunner

Mode = Literal["warm-up", "running", "stopped", "ended"]


@dataclass(frozen=True)
class AsyncModelAverageAlgorithm(ModelAveragingAlgorithm):
    """Each rank trains at its own speed, and a background thread averages the weights of all ranks.

    In each round, each rank takes a snapshot of its weights between two steps, and the mean of the snapshots is
    computed. Then, again between two steps, x += mean - snapshot. So each rank preserves the updates that it has made
    meanwhile, and ranks may take different numbers of steps (AD-PSGD, Lian et al., arXiv 1710.06952; Bagua, arXiv
    2107.01499). In each round, a rank sends 8 (n-1)/n bytes per float32 parameter.

    After the warm-up, training waits for the network only in `abort`, `resume`, `load_state_dict` and detach, and when
    layers are unfrozen. Rounds continue until you detach or the process ends, even if your script keeps no reference to
    the module and the attachment.

    With `compression`, ranks send the differences between their weights and the last mean. The residual of a difference
    stays in the rank's weights until a later round. The first round after attach, `resume` or `averaged_weights` and
    the last round are in full precision. Buffers and the warm-up are in full precision too. Compression takes 16 bytes
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
        """Load the native kernels if there is a codec. Full precision needs no kernels."""
        if self.compression is not None:
            super().prepare()

    def state_arguments(self, process_group: BaguaProcessGroup) -> dict[str, Any]:
        """Return `average_buffers` and `warmup_steps`."""
        return {**super().state_arguments(process_group), "warmup_steps": self.warmup_steps}

    def check_state(self, saved: Mapping[str, Any], state: Mapping[str, Any], process_group: BaguaProcessGroup) -> None:
        """Raise ValueError for another `average_buffers`, or if the warm-up would start again."""
        num_warm = saved.get("warmup_steps", self.warmup_steps)
        if state.get("step", 0) >= num_warm < self.warmup_steps:
            raise ValueError(
                f"{type(self).__name__}: the state is past a warm-up of warmup_steps={num_warm}, but the attached "
                f"algorithm has warmup_steps={self.warmup_steps}; attach with at most {num_warm}"
            )
        super().check_state({**saved, "warmup_steps": self.warmup_steps}, state, process_group)

    def make_codec(self) -> Compressor:
        return by_name(self.compression)

    def make_impl(self, runner: Runner) -> "AsyncModelAverageAlgorithmImpl":
        """Return the impl.

        Raises:
            ValueError: the interval between rounds is longer than half the group's timeout.
        """
        timeout_s = runner.process_group.timeout.total_seconds()
        if self.sync_interval_ms > 500 * timeout_s:
            raise ValueError(
                f"AsyncModelAverageAlgorithm: sync_interval_ms must be at most half the timeout of attach or of the "
                f"group, {timeout_s:g} s, got {self.sync_interval_ms}"
            )
        return AsyncModelAverageAlgorithmImpl(runner)


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl):
    """The `Attachment.impl` while `AsyncModelAverageAlgorithm` is attached. It stops and resumes averaging.

    Attributes:
        step: training steps so far.
        clock: measures the interval between rounds.
    """

    algorithm: AsyncModelAverageAlgorithm
    runner: WeightRunner

    def __init__(self, runner: Runner, *, clock: WaitClock | None = None) -> None:
        super().__init__(runner)
        self.step = 0
        self.clock = clock or MonotonicWaitClock()
        self._weights = self.algorithm.make_weights(self.runner, self._progress)
        self._warm_up = GradientWarmUp(self._weights, runner.process_group)
        self._means = SnapshotMeans()
        self._is_single_rank = runner.process_group.size == 1
        self._is_enabled = True
        self._leaving_rank: int | None = None
        self._rounds: BackgroundRounds | None = None
        self._num_rounds_before = 0
        self._num_calls = 0
        # Each rank skips steps independently.
        self.runner.needs_grad_scaler, self.runner.agree_on_overflow = False, bool
        self.runner.replicas_diverge = lambda: self.mode == "running" and self._weights.has_final_mean

    @property
    def mode(self) -> Mode:
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
        if not self._is_enabled or self._leaving_rank is not None:
            return
        self._is_enabled = False
        self._num_calls += 1
        if self._rounds is not None:
            self._stop("abort", self.algorithm.final_average if final_average is None else final_average)
        else:
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
        if self._is_enabled:
            return
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
        """Wait until all ranks have called this. Called only while no rounds are running."""
        if not self._is_single_rank:
            self._weights.lockstep.submit(lambda: None, purpose).result()

    def need_reset(self) -> bool:
        # During the warm-up, ranks synchronize at each step. Rounds refuse a changed layout at the next vote. Without
        # rounds, ranks do not synchronize.
        return self._weights.need_reset(meets=self.mode == "warm-up")

    def reset(self) -> None:
        """Rebuild buckets. Running rounds stop meanwhile, on all ranks."""
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
        # Buffers are not compressed: a small variance next to a large one would be lost in 8 bits.
        if not isinstance(codec, Identity) and bucket.flat.dtype in ELEMENT_TYPES and not bucket.are_buffers:
            self._means.compress(bucket, codec)

    def init_post_backward_hook(self, module: torch.nn.Module) -> Callable[[], None]:
        return self._after_backward

    def _after_backward(self) -> None:
        """Average gradients during the warm-up."""
        if self._is_single_rank or self.mode != "warm-up":
            return
        self.runner.reset_if_needed()  # a layer may have been unfrozen or replaced since the last step
        self._warm_up.average_gradients()

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        """Start averaging if there is no warm-up. Return the function that serves background rounds between steps."""
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
                "this rank continues to train alone"
            )

    def _progress(self) -> dict[str, int]:
        return {
            "optimizer steps of the warm-up": min(self.step, self.algorithm.warmup_steps),
            "calls of abort and resume": self._num_calls,
            "running series of rounds": int(self.mode == "running"),
        }

    def weights_loaded(self, values: Mapping[str, torch.Tensor]) -> None:
        """Prevent the means of snapshots from before the load from changing the loaded weights.

        Averaging pauses until all ranks have loaded. All ranks raise if this takes longer than the timeout.
        """
        super().weights_loaded(values)
        if self._rounds is not None:
            self._rounds.weights_loaded(values.keys(), self._weights.lockstep.loads.mark)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Stop averaging, set all ranks' weights to their mean within the context, and resume averaging afterwards.

        Collective: rounds continue until all ranks have entered the context, which they must do within the group's
        timeout of each other. They restart when all ranks have left it,
        which they must do within the group's timeout of each other. If an exception ends the context, they restart with
        the next step.

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
        # Do not restart if an exception ends the context: other ranks may still be in their contexts, and a round would
        # wait for them. If training continues nevertheless, rounds restart with the next step.
        if was_running:
            self._start()

    def finish(self) -> bool:
        """Stop averaging together with all ranks, as `abort` does."""
        if self._leaving_rank is not None:
            return False
        if self._rounds is None:
            return super().finish()
        with self.runner.tracer.span("detach"):
            return self._stop("detach", self.algorithm.final_average).has_mean

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far, whether averaging is enabled, and the differences that are not yet applied.

        A round in flight continues. It is part of the state of only those ranks that call this after the round has
        ended. Between `abort` and `resume`, the states of all ranks are consistent.
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
        """Load the state that `state_dict` returned, after the weights that belong to it have been loaded.

        Collective: running rounds stop, without changing the weights, and restart.
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


register("async", AsyncModelAverageAlgorithm, "weights averaged in the background, without blocking training")
