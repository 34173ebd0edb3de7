"""A user's codec, shown in docs/extend/codec.md: one class, and one line that registers it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchbagua as tb
from documentation import names_in
from oracle import ordered_sum
from ranks import run_ranks
from torchbagua.codecs import register_compressor
from torchbagua.codecs.base import REGISTRY, by_name

NAMES = names_in("extend/codec.md", "class FewLargest", module=__name__)
FewLargest = NAMES["FewLargest"]
REGISTERED = REGISTRY.pop("few_largest")  # other tests list the registered names


def sparse(x: np.ndarray, segments: tuple[int, ...], block: int, num_kept: int) -> np.ndarray:
    """Return the elements of `x` that the codec keeps, and zeros; written independently of the codec."""
    left, start = np.zeros_like(x), 0
    for length in segments:
        for first in range(start, start + length, block):
            part = x[first : min(first + block, start + length)]
            kept = np.argsort(-np.abs(part), kind="stable")[:num_kept]
            left[first + kept] = part[kept]
        start += length
    return left


SEGMENTS = (1000, 1, 333)


@pytest.mark.parametrize("size", [1, 3])
def test_the_mean_of_kept_elements_is_encoded_again(size: int) -> None:
    codec = FewLargest(64, num_kept=5)
    values = torch.randn(size, sum(SEGMENTS), generator=torch.Generator().manual_seed(0))

    def body(group: dist.ProcessGroup) -> torch.Tensor:
        own = tb.BaguaProcessGroup(group)
        tensors = [tb.extend.BaguaTensor(str(length), torch.zeros(length)) for length in SEGMENTS]
        bucket = tb.extend.BaguaBucket("bucket", tensors, own, values[group.rank()].clone())
        mean = bucket.append_centralized_synchronous_op(compression=codec).run()
        own.close()
        return mean

    means = run_ranks(size, body)
    assert all(torch.equal(mean, means[0]) for mean in means)
    left = [sparse(row, SEGMENTS, 64, 5) for row in values.numpy()]
    expected = sparse(ordered_sum(left) / np.float32(size), SEGMENTS, 64, 5) if size > 1 else values[0].numpy()
    assert torch.equal(means[0], torch.from_numpy(expected))


def test_it_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert REGISTERED is FewLargest
    monkeypatch.setitem(REGISTRY, "few_largest", FewLargest)
    assert by_name("few_largest") == FewLargest()
    assert by_name("few_largest", block=64, num_kept=5) == FewLargest(64, num_kept=5)
    with pytest.raises(ValueError, match="a codec named 'few_largest' is already registered"):
        register_compressor("few_largest", FewLargest)
    with pytest.raises(ValueError, match="'few_largest' needs error_feedback=True"):
        tb.CompressedAllReduceAlgorithm("few_largest")
