"""DiLoCo in one process: computes the expected outer rounds from the recorded weights of all workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import oracle
import torchbagua as tb
from averaging import Trace, is_buffer, stacked
from training import flat

BLOCK = 128  # of MinMaxUInt4


def fragment_of(bucket: tb.extend.BaguaBucket) -> int:
    """Return the number of the fragment to which a bucket belongs, which its name begins with."""
    return int(bucket.name.removeprefix("fragment ").split()[0])


def fragments_of(runner: tb.extend.Runner) -> dict[str, int]:
    """Return the fragment of each parameter, by name."""
    tensors = [(tensor, fragment_of(bucket)) for bucket in runner.weights for tensor in bucket.tensors]
    return {tensor.name: fragment for tensor, fragment in tensors if tensor.is_parameter}


@dataclass
class InFlight:
    """A round between its snapshot and its application."""

    step: int
    snapshots: dict[str, list[oracle.Array]]
    new: dict[str, oracle.Array]


class OuterRounds:
    """Computes outer rounds: torch.optim.SGD steps the shadow weights, on the stacked arrays of all ranks.

    Args:
        start: the initial shadow weights, and buffers, by name.
        algorithm: its `compression` must be None or "minmax_uint4"; with error feedback.
        fragments: the fragment of each parameter.
        nodes: the node of each rank if nodes are the workers; the ranks of a node then have equal parameters.
    """

    def __init__(
        self,
        start: Mapping[str, torch.Tensor],
        algorithm: tb.DiLoCoAlgorithm,
        fragments: Mapping[str, int],
        nodes: Sequence[int] | None = None,
    ) -> None:
        self.algorithm, self.fragments, self.nodes = algorithm, fragments, nodes
        self.theta = {name: weight.flatten().clone() for name, weight in start.items() if not is_buffer(name)}
        self.optimizer = torch.optim.SGD(
            list(self.theta.values()), algorithm.outer_lr, algorithm.outer_momentum, nesterov=algorithm.nesterov
        )
        self.means = {name: self.mean_of(tensor.numel()) for name, tensor in start.items()}
        self.in_flight: InFlight | None = None

    def mean_of(self, length: int) -> "oracle.TwoPhaseResiduals":
        """Return the mean of a parameter's outer gradients; in full precision residuals are zero."""
        compresses = self.algorithm.compression is not None
        coded = oracle.quantise_block_4_bits if compresses else lambda block: block
        return oracle.TwoPhaseResiduals(lambda x: oracle.quantise(x, [length], BLOCK, coded))

    def is_due(self, name: str, step: int) -> bool:
        interval, number = self.algorithm.inner_steps, self.algorithm.fragments
        fragment = number - 1 if is_buffer(name) else self.fragments[name]
        return (step - (fragment + 1) * interval // number) % interval == 0

    def after_step(self, step: int, updated: Mapping[str, list[oracle.Array]]) -> dict[str, list[oracle.Array]]:
        """Return the workers' weights after the rounds that start or end at step number `step`, from 1."""
        weights = {name: list(rows) for name, rows in updated.items()}
        delay = self.algorithm.delay
        if self.in_flight is not None and step == self.in_flight.step + delay:
            for name, snapshots in self.in_flight.snapshots.items():
                weights[name] = [
                    oracle.moved(w, self.in_flight.new[name] - old, old, is_buffer=is_buffer(name))
                    for w, old in zip(weights[name], snapshots, strict=True)
                ]
            self.in_flight = None
        due = {name: rows for name, rows in weights.items() if self.is_due(name, step)}
        if due:
            new = {name: self.round_of(name, rows) for name, rows in due.items()}
            if delay:
                self.in_flight = InFlight(step, due, new)
            else:
                weights |= {name: [value] * len(weights[name]) for name, value in new.items()}
        return weights

    def round_of(self, name: str, rows: Sequence[oracle.Array]) -> oracle.Array:
        """Return the new shadow weights of a parameter, or the mean of a buffer."""
        if is_buffer(name):
            return oracle.gradient_allreduce(rows, self.nodes)
        if self.nodes is not None:
            rows = [rows[self.nodes.index(node)] for node in dict.fromkeys(self.nodes)]
        theta = self.theta[name]
        mean = torch.from_numpy(self.means[name]([flat(theta) - row for row in rows])).to(theta.device)
        if mean.any():  # by rule, an all-zero mean changes neither the shadow weights nor their momentum
            theta.grad = mean
            self.optimizer.step()  # on the weights' device: on a GPU, SGD has other last bits
            theta.grad = None
        return flat(theta).copy()


def check_rounds(
    traces: Sequence[Trace],
    algorithm: tb.DiLoCoAlgorithm,
    fragments: Mapping[str, int],
    nodes: Sequence[int] | None = None,
) -> OuterRounds:
    """Check that every step of every rank is bitwise equal to the oracle."""
    rounds = OuterRounds(traces[0].start[0], algorithm, fragments, nodes)
    for step in range(len(traces[0].updated)):
        names = traces[0].start[0]
        updated = {name: stacked([trace.updated[step] for trace in traces], name) for name in names}
        expected = rounds.after_step(step + 1, updated)
        for name in names:
            after = stacked([trace.start[step + 1] for trace in traces], name)
            np.testing.assert_array_equal(after, expected[name], f"step {step + 1}, {name}")
    return rounds
