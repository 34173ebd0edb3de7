"""Weight algorithms as users would write them: local SGD and the overlapped mean of docs/extend.

test_check_algorithm.py checks that they resume and that their averaged weights are temporary.
"""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist

import oracle
import torchbagua as tb
from averaging import (
    Normed,
    Trace,
    Trainer,
    Weights,
    assert_same_weights,
    stacked,
    train,
    weights_of,
)
from documentation import names_in
from ranks import leave_by_exception, run_ranks
from training import Wide, build

LocalSGD = names_in("extend/algorithm.md", "class LocalSGD", module=__name__)["LocalSGD"]
OverlappedAveraging = names_in("extend/overlapped-rounds.md", "class OverlappedAveraging", module=__name__)[
    "OverlappedAveraging"
]


def check_local_sgd(traces: list[Trace], algorithm: tb.Algorithm) -> None:
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
                expected = [oracle.ordered_sum([updated[peer] for peer in row]) / number(len(row)) for row in rows]
            np.testing.assert_array_equal(after, expected, f"step {step}, {name}")
        num_rounds += is_due
    assert_same_weights([trace.final for trace in traces])


@pytest.mark.parametrize(
    ("make_model", "topology"),
    [(Normed, tb.topology.AllRanks()), (Normed, tb.topology.ShiftOne()), (Wide, tb.topology.Ring())],
)
def test_equals_the_oracle(make_model: type[torch.nn.Module], topology: tb.extend.Topology) -> None:
    """Bitwise in every step, for buffers and all dtypes; after detach, all ranks have equal weights."""
    model, algorithm = build(make_model), LocalSGD(2, topology)
    check_local_sgd(run_ranks(4, lambda group: train(group, model, algorithm, num_steps=6)), algorithm)


def test_the_overlapped_mean_equals_the_built_in_algorithm() -> None:
    """Bitwise in every step, buffers too; also if weights are loaded while a round is in flight."""
    model = build(Normed)

    def body(group: dist.ProcessGroup, algorithm: tb.Algorithm) -> tuple[Trace, Weights, Weights]:
        trainer = Trainer(group, model)
        with tb.attach(trainer.ddp, trainer.optimizer, algorithm):
            for _ in range(3):
                trainer.step()
            trainer.module.load_state_dict(copy.deepcopy(model).state_dict())
            for _ in range(3):
                trainer.step()
            last = weights_of(trainer.module)
        return trainer.trace, last, weights_of(trainer.module)

    own = run_ranks(2, lambda group: body(group, OverlappedAveraging()))
    built_in = run_ranks(2, lambda group: body(group, tb.DecentralizedAlgorithm()))
    for (trace, last, final), (reference, reference_last, reference_final) in zip(own, built_in, strict=True):
        for weights, reference_weights in zip(trace.start, reference.start, strict=True):
            assert_same_weights([weights, reference_weights])
        assert_same_weights([last, reference_last])
        assert_same_weights([final, reference_final])


def test_ranks_out_of_step_raise() -> None:
    model = build(Normed)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, copy.deepcopy(model))
        attachment = tb.attach(trainer.ddp, trainer.optimizer, LocalSGD(1))
        if group.rank():
            attachment.impl.step += 1
        with pytest.raises(
            tb.CommunicationError, match=r"out of step in a round: .* steps: rank 0 has 1, rank 1 has 2"
        ):
            trainer.step()
        leave_by_exception(attachment)

    run_ranks(2, body)
