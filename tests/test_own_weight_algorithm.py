"""A weight algorithm as somebody else would write it: local SGD over any topology, on the documented interface only."""

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import oracle
import torchbagua as tb
from averaging import Normed, Trace, Trainer, assert_same_weights, check_unchanged, stacked, train, weights_of
from ranks import run_ranks
from training import Wide, build


@dataclass(frozen=True)
class LocalSGD(tb.Algorithm):
    """Every rank trains alone, and after some steps takes the mean of weights with its neighbours (arXiv 1805.09767).

    Args:
        every: steps from one mean to the next.
        topology: whose mean.
    """

    every: int = 3
    topology: tb.Topology | str = "all"

    def prepare(self) -> None:
        """Nothing: no native kernel is used."""

    def make_impl(self, process_group: tb.BaguaProcessGroup) -> "LocalSGDImpl":
        """Return what runs it."""
        return LocalSGDImpl(process_group, self)


class LocalSGDImpl(tb.AlgorithmImpl):
    """See `LocalSGD`."""

    def __init__(self, process_group: tb.BaguaProcessGroup, algorithm: LocalSGD) -> None:
        super().__init__(process_group, algorithm)
        self.weights = tb.WeightBuckets(process_group, "LocalSGD", bucket_cap_mb=0.01)
        self.step = 0

    def init_tensors(self, module: torch.nn.Module) -> list[tb.BaguaTensor]:
        return self.weights.select(module, self.ignored_names)

    def tensors_to_buckets(self, tensors: list[tb.BaguaTensor], do_flatten: bool) -> list[tb.BaguaBucket]:
        return self.weights.make_buckets(tensors)

    def need_reset(self) -> bool:
        return self.weights.need_reset()

    def init_operations(self, module: torch.nn.Module | None, bucket: tb.BaguaBucket) -> None:
        bucket.append_decentralized_synchronous_op(bucket.flat, peer_selection_mode=self.algorithm.topology)
        bucket.round_index = self.step // self.algorithm.every

    def init_post_optimizer_step_hook(self, module: torch.nn.Module) -> Callable[[torch.optim.Optimizer], None]:
        return self.after_step

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step, and average where it is time."""
        self.step += 1
        if self.step % self.algorithm.every == 0:
            self.weights.read()
            self.weights.submit_in_lockstep(self.lane, self.run_buckets, "a round", self.progress).result()
            self.weights.write()

    def run_buckets(self) -> None:
        """On the lane."""
        for bucket in self.buckets:
            bucket.run()

    @property
    def progress(self) -> dict[str, int]:
        """What ranks have in common when they average."""
        return {"steps": self.step, "as fingerprint of the weights": self.weights.fingerprint}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        for bucket in self.buckets:
            bucket.round_index = self.step // self.algorithm.every

    def finish(self, *, failed: bool) -> bool:
        if not failed:
            self.weights.take_mean(self.lane, self.progress)
            self.ends_in_order = True
        return not failed


TOPOLOGIES = [tb.topology.AllRanks(), tb.topology.Ring(), tb.topology.ShiftOne()]


def check_local_sgd(traces: list[Trace], algorithm: LocalSGD) -> None:
    size, num_rounds = len(traces), 0
    for step in range(len(traces[0].updated)):
        is_due = step % algorithm.every == algorithm.every - 1
        for name in traces[0].start[0]:
            updated = stacked([trace.updated[step] for trace in traces], name)
            after = stacked([trace.start[step + 1] for trace in traces], name)
            expected = updated
            if is_due:
                round = num_rounds % algorithm.topology.period(size)
                rows = [sorted(algorithm.topology.neighbours(rank, size, round)) for rank in range(size)]
                number = updated[0].dtype.type
                expected = [oracle.ordered_sum([updated[one] for one in row]) / number(len(row)) for row in rows]
            np.testing.assert_array_equal(after, expected, f"step {step}, {name}")
        num_rounds += is_due
    assert_same_weights([trace.final for trace in traces])


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
@pytest.mark.parametrize("make_model", [Normed, Wide])
def test_equals_the_oracle(make_model: type[torch.nn.Module], topology: tb.Topology) -> None:
    """Every step, buffers and all dtypes, to the bit; after detach the weights are the same everywhere."""
    model, algorithm = build(make_model), LocalSGD(2, topology)
    check_local_sgd(run_ranks(4, lambda group: train(group, model, algorithm, num_steps=6)), algorithm)


def test_a_group_of_one_changes_nothing() -> None:
    model = build(Normed)
    (trace,) = run_ranks(1, lambda group: train(group, model, LocalSGD()))
    check_unchanged(trace)


def test_resumes_in_the_middle_of_a_round() -> None:
    model, algorithm = build(Normed), LocalSGD(2, tb.topology.ShiftOne())

    def body(group: dist.ProcessGroup) -> None:
        first, second, file = Trainer(group, model), Trainer(group, model), io.BytesIO()
        with tb.attach(first.ddp, first.optimizer, algorithm) as attachment:
            for _ in range(3):
                first.step()
            states = [attachment.state_dict(), first.module.state_dict(), first.optimizer.state_dict()]
            torch.save([*states, first.data.get_state()], file)
            for _ in range(4):
                first.step()
        file.seek(0)
        with tb.attach(second.ddp, second.optimizer, algorithm) as attachment:
            state, weights, moments, data = torch.load(file, weights_only=True)
            second.module.load_state_dict(weights)
            second.optimizer.load_state_dict(moments)
            second.data.set_state(data)
            attachment.load_state_dict(state)
            for _ in range(4):
                second.step()
        assert_same_weights([weights_of(first.module), weights_of(second.module)])

    run_ranks(4, body)


def test_ranks_out_of_step_are_told_so() -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, copy.deepcopy(model))
        attachment = tb.attach(trainer.ddp, trainer.optimizer, LocalSGD(1))
        if group.rank():
            attachment.impl.step += 1
        with pytest.raises(tb.CommunicationError, match="out of step in a round: rank 0 has 1 steps, rank 1 has 2"):
            trainer.step()
        attachment._end(failed=True)

    run_ranks(2, body)
