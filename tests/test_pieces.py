"""Long chunks and shards are sent in pieces between CPUs: results are bitwise equal to those of short buckets."""

import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from ranks import run_ranks
from torchbagua.codecs import Cast, Compressor, Identity, MinMaxUInt8, TensorSpec
from torchbagua.collectives import mean
from torchbagua.collectives.error_feedback import TwoPhaseResiduals
from torchbagua.collectives.mean import TwoPhaseMean, centralized_mean

SEGMENTS = (30 * 2048, 7, 50 * 2048, 20 * 2048 + 5)


@pytest.fixture(autouse=True)
def _short_messages_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send messages in pieces from about a tenth of the usual length, so that these segments are long enough."""
    monkeypatch.setattr(mean, "SMALL_MESSAGE_BYTES", mean.SMALL_MESSAGE_BYTES // 9)


@pytest.mark.parametrize(
    ("size", "is_fast", "compressor", "has_feedback"),
    [
        (3, False, MinMaxUInt8(), True),
        (3, True, MinMaxUInt8(), False),
        (2, True, Identity(), False),
    ],
    ids=str,
)
def test_means_in_pieces_equal_those_of_short_buckets(
    size: int, is_fast: bool, compressor: Compressor, has_feedback: bool
) -> None:
    lengths = tuple(length * (size if length > 7 else 1) for length in SEGMENTS)
    values = torch.randn(size, sum(lengths), generator=torch.Generator().manual_seed(0))

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, int]:
        recorder = tb.observe.Recorder()
        own = tb.BaguaProcessGroup(group, observers=[recorder])
        own.world.link_bytes_per_s = [1e12 if is_fast else -1e12] * size

        def fifth_mean(x_N: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
            """Return the fifth mean, which includes the residuals of the four means before it."""
            spec = TensorSpec(lengths, torch.float32, x_N.device, "numbers")
            residuals = TwoPhaseResiduals(x_N.device) if has_feedback else None
            mean = TwoPhaseMean(own.world, compressor, spec, float(size), residuals=residuals)
            for _ in range(5):
                mean(out_N := x_N.clone())
                if residuals is not None:
                    residuals.commit()
            return out_N

        x_N = values[group.rank()]
        of_long = fifth_mean(x_N, lengths)
        own.tracer.end()
        sends = [event for event in recorder.events if event.phase == "send"]
        for peer in range(size):
            to_peer = sorted((event.start_ns, event.end_ns) for event in sends if event.peers == (peer,))
            assert all(first[1] <= third[0] for first, third in zip(to_peer, to_peer[2:], strict=False)), (
                "two at a time"
            )
        of_short = torch.cat([fifth_mean(part_N, (len(part_N),)) for part_N in x_N.split(lengths)])
        own.close()
        return of_long, of_short, len(sends)

    for of_long, of_short, num_sent in run_ranks(size, body):
        assert torch.equal(of_long, of_short)
        assert num_sent == 5 * 2 * 2 * (size - 1)  # means, pieces, phases, peers


@pytest.mark.parametrize(
    ("nodes", "compressor", "intra_compressor"),
    [
        ([0, 0, 1, 1], MinMaxUInt8(), None),
        ([0, 0, 0, 1, 1], Identity(), Cast()),  # one rank owns no shard
        ([0, 0, 1], MinMaxUInt8(), MinMaxUInt8(2048 * 3)),
    ],
    ids=str,
)
def test_means_over_nodes_in_pieces_equal_those_of_short_buckets(
    nodes: list[int],
    compressor: Compressor,
    intra_compressor: Compressor | None,
) -> None:
    values = torch.randn(len(nodes), sum(SEGMENTS), generator=torch.Generator().manual_seed(0))

    def body(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, int]:
        recorder = tb.observe.Recorder()
        own = tb.BaguaProcessGroup(group, nodes=nodes, observers=[recorder])

        def fifth_mean(x_N: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
            spec = TensorSpec(lengths, torch.float32, x_N.device, "numbers")
            mean = centralized_mean(own, compressor, spec, hierarchical=True, intra_compressor=intra_compressor)
            for index in range(5):
                # Into another tensor, and in place.
                mean(x_N, out_N := torch.empty_like(x_N)) if index % 2 else mean(out_N := x_N.clone())
            return out_N

        x_N = values[group.rank()]
        of_long = fifth_mean(x_N, SEGMENTS)
        own.tracer.end()
        num_sent = sum(event.phase == "send" for event in recorder.events)
        of_short = torch.cat([fifth_mean(part_N, (len(part_N),)) for part_N in x_N.split(SEGMENTS)])
        own.close()
        return of_long, of_short, num_sent

    for rank, (of_long, of_short, num_sent) in enumerate(run_ranks(len(nodes), body)):
        assert torch.equal(of_long, of_short)
        if nodes == [0, 0, 1, 1]:
            assert num_sent == 5 * 2 * 4, rank  # means, pieces, phases within nodes and between them, to one peer each
