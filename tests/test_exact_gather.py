"""Rows that are gathered uncompressed: among all ranks or some, flat or via nodes, alongside another collective."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from devices import CPU
from ranks import run_ranks
from torchbagua.collectives.exact_gather import ExactGather
from torchbagua.collectives.exchange import Exchange, Pipeline
from torchbagua.transport.base import TransportMaker
from transports import CollectivesAlone

SIZE = 4


def make_result(rank: int, ranks: Sequence[int], length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a result that contains only the rank's own row."""
    out = torch.full((len(ranks) * length,), -1.0).to(dtype)
    place = ranks.index(rank)
    out[place * length : (place + 1) * length] = (torch.arange(length) + 10 * rank).to(dtype)
    return out


@pytest.mark.parametrize(
    ("nodes", "ranks", "transport"),
    [
        ([0, 0, 0, 0], [0, 1, 2, 3], None),
        ([0, 1, 2, 3], [0, 1, 2, 3], None),
        ([0, 0, 0, 1], [0, 1, 2, 3], None),
        ([0, 1, 1, 1], [3, 1, 0, 2], None),
        ([0, 0, 1, 1], [1, 2], None),
        ([0, 1, 1, 1], [3, 1, 0, 2], CollectivesAlone),
        ([0, 0, 1, 1], [1, 2], CollectivesAlone),
    ],
)
def test_rows_of_all(nodes: list[int], ranks: list[int], transport: TransportMaker | None) -> None:
    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group, nodes=nodes, transport=transport)
        twin = own.world.silent_twin()
        other_ranks = [rank for rank in range(SIZE) if rank not in ranks]  # they gather at the same time
        here = ranks if own.rank in ranks else other_ranks
        gather = ExactGather(twin, here, own.nodes, "rows")
        for length, dtype in ((3, torch.float32), (0, torch.float32), (5, torch.bfloat16), (200_000, torch.uint8)):
            out = make_result(own.rank, here, length, dtype)
            gather(out)
            results = [make_result(rank, here, length, dtype) for rank in here]
            rows = [result.view(len(here), -1)[at] for at, result in enumerate(results)] if length else [out]
            assert torch.equal(out, torch.cat(rows))

    run_ranks(SIZE, body)


def test_a_row_crosses_to_each_other_node_once() -> None:
    """Counted in the posts of messages, of which observers are not notified."""
    nodes = [0, 0, 0, 1, 1]

    def body(group: dist.ProcessGroup) -> int:
        own = tb.BaguaProcessGroup(group, nodes=nodes)
        twin = own.world.silent_twin()
        targets: list[int] = []
        post = twin.post

        def count_and_post(direction: str, peer: int, tensor: torch.Tensor, **named: object) -> None:
            targets.extend([peer] * (direction == "sending to" and tensor.numel() > 0))
            post(direction, peer, tensor, **named)  # type: ignore[arg-type]

        twin.post = count_and_post  # type: ignore[method-assign,assignment]
        ExactGather(twin, range(5), own.nodes, "rows")(make_result(own.rank, range(5), 3, torch.float32))
        return sum(nodes[target] != nodes[own.rank] for target in targets)

    assert run_ranks(5, body) == [1] * 5


def test_a_group_closed_by_a_failure_raises_it_on_all_threads() -> None:
    """The thread that failed may not have raised yet."""

    def body(group: dist.ProcessGroup) -> None:
        own = tb.BaguaProcessGroup(group)
        twin = own.world.silent_twin()
        if own.rank == 0:
            own.close()
            return
        match = r"all_to_all of gradients over the world group failed on rank 1 receiving from rank 0: "
        with pytest.raises(tb.CommunicationError, match=match):
            Exchange(Pipeline(own.world, CPU), "all_to_all", [torch.ones(1)] * 2, "gradients").run([torch.ones(1)])
        with pytest.raises(tb.CommunicationError, match=match):
            ExactGather(twin, range(2), own.nodes, "weights")(torch.ones(2))

    run_ranks(2, body)
