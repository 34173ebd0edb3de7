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
    ("nodes", "is_fast", "compressor", "intra_compressor", "has_feedback"),
    [
        ([0, 0, 0], False, MinMaxUInt8(), None, True),
        ([0, 0, 0], True, MinMaxUInt8(), None, False),
        ([0, 0], True, Identity(), None, False),
        ([0, 0, 1, 1], None, MinMaxUInt8(), Identity(), False),
        ([0, 0, 0, 1, 1], None, Identity(), Cast(), False),  # one rank owns no shard
        ([0, 0, 1], None, MinMaxUInt8(), MinMaxUInt8(2048 * 3), False),
    ],
    ids=str,
)
def test_means_in_pieces_equal_those_of_short_buckets(
    nodes: list[int],
    is_fast: bool | None,
    compressor: Compressor,
    intra_compressor: Compressor | None,
    has_feedback: bool,
) -> None:
    size, on_one_node = len(nodes), intra_compressor is None
    lengths = tuple(length * (size if length > 7 and on_one_node else 1) for length in SEGMENTS)
    values = torch.randn(size, sum(lengths), generator=torch.Generator().manual_seed(0))

    def body(group: dist.ProcessGroup) -> int:
        recorder = tb.observe.Recorder()
        own = tb.BaguaProcessGroup(group, nodes=nodes, observers=[recorder])
        if is_fast is not None:
            own.world.link_bytes_per_s = [1e12 if is_fast else -1e12] * size

        def fifth_mean(x_N: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
            """Return the fifth mean, which includes the residuals of the four means before it."""
            spec = TensorSpec(lengths, torch.float32, x_N.device, "numbers")
            residuals = TwoPhaseResiduals(x_N.device) if has_feedback else None
            if on_one_node:
                mean = TwoPhaseMean(own.world, compressor, spec, float(size), residuals=residuals)
            else:
                mean = centralized_mean(own, compressor, spec, hierarchical=True, intra_compressor=intra_compressor)
            for index in range(5):
                # Into another tensor, and in place.
                mean(x_N, out_N := torch.empty_like(x_N)) if index % 2 else mean(out_N := x_N.clone())
                if residuals is not None:
                    residuals.commit()
            return out_N

        x_N = values[group.rank()]
        of_long = fifth_mean(x_N, lengths)
        own.tracer.end()
        sends = [event for event in recorder.events if event.phase == "send"]
        for peer in range(size) if on_one_node else ():
            to_peer = sorted((event.start_ns, event.end_ns) for event in sends if event.peers == (peer,))
            two_at_a_time = zip(to_peer, to_peer[2:], strict=False)
            assert all(first[1] <= third[0] for first, third in two_at_a_time)
        assert torch.equal(of_long, torch.cat([fifth_mean(part_N, (len(part_N),)) for part_N in x_N.split(lengths)]))
        own.close()
        return len(sends)

    for num_sent in run_ranks(size, body):
        if on_one_node:
            assert num_sent == 5 * 2 * 2 * (size - 1)  # means, pieces, phases, peers
        elif nodes == [0, 0, 1, 1]:
            assert num_sent == 5 * 2 * 4  # means, pieces, phases within nodes and between them, to one peer each
