"""Checks of the collectives that a transport claims."""

import torch
import torch.distributed as dist

from torchbagua.testing.transports.member import Member, Mismatch


def check_all_to_all(member: Member) -> None:
    """Members exchange parts of arbitrary lengths, including empty ones."""
    transport = member.open()
    ranks = range(member.size)
    lengths = [[(3 * sender + 5 * receiver) % 7 * 10 for receiver in ranks] for sender in ranks]
    for tag in range(3):
        inputs = [member.message(transport, member.rank, peer, lengths[member.rank][peer], tag) for peer in ranks]
        outputs = [member.zeros(transport, lengths[peer][member.rank]) for peer in ranks]
        transport.all_to_all(outputs, inputs)
        member.settle(transport)
        for peer, got in enumerate(outputs):
            expected = member.message(transport, peer, member.rank, len(got), tag)
            member.expect_bits(f"all_to_all: output from rank {peer}", got, expected)


def check_all_to_all_single(member: Member) -> None:
    """Members exchange parts of equal length, as one tensor of bytes or floating-point values."""
    transport = member.open()
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        num_bytes = 12 * dtype.itemsize

        def part(sender: int, receiver: int, num_bytes: int = num_bytes) -> torch.Tensor:
            return member.message(transport, sender, receiver, num_bytes)

        sent = torch.cat([part(member.rank, peer) for peer in range(member.size)]).view(dtype)
        received = torch.zeros_like(sent)
        transport.all_to_all_single(received, sent)
        member.settle(transport)
        expected = torch.cat([part(peer, member.rank) for peer in range(member.size)])
        member.expect_bits(f"all_to_all_single: output of {dtype}", received, expected)


def check_all_gather(member: Member) -> None:
    """Members gather parts of equal length, from a separate tensor and from the output itself."""
    transport = member.open()
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        num_bytes = 12 * dtype.itemsize
        parts = [member.message(transport, peer, peer, num_bytes).view(dtype) for peer in range(member.size)]
        expected = torch.cat(parts)
        output = torch.zeros_like(expected)
        transport.all_gather_into_tensor(output, parts[member.rank])
        member.settle(transport)
        member.expect_bits(f"all_gather_into_tensor: output of {dtype}", output, expected)
        output.zero_()
        own = output.view(member.size, -1)[member.rank]
        own.copy_(parts[member.rank])
        transport.all_gather_into_tensor(output, own)
        member.settle(transport)
        member.expect_bits(f"all_gather_into_tensor in place: output of {dtype}", output, expected)


def check_all_reduce(member: Member) -> None:
    """Every member gets the sum. The values are multiples of 1/8, whose sums are exact in any order."""
    transport = member.open()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for num_elements in (1, 1001):
            tensors = [
                torch.randint(-16, 17, (num_elements,), generator=torch.Generator().manual_seed(rank)) / 8
                for rank in range(member.size)
            ]
            tensor = member.zeros(transport, num_elements, dtype).copy_(tensors[member.rank])
            transport.all_reduce(tensor)
            member.settle(transport)
            expected = torch.stack(tensors).sum(0).to(dtype)
            member.expect_values(f"all_reduce of {num_elements} elements of {dtype}", tensor.cpu(), expected)


def check_collectives_in_turn(member: Member) -> None:
    """Collectives and messages alternate."""
    transport = member.open()
    for _ in range(3):
        member.use(transport)


def check_torch_group(member: Member) -> None:
    """The torch group that the transport claims has the members as its ranks."""
    group = member.open().torch_group()
    got = (type(group).__name__, group.rank(), group.size()) if isinstance(group, dist.ProcessGroup) else group
    if not isinstance(group, dist.ProcessGroup) or (group.rank(), group.size()) != (member.rank, member.size):
        raise Mismatch(f"torch_group: expected a group with rank {member.rank} of {member.size}, got {got}")


COLLECTIVE_CHECKS = {
    "all_to_all": (check_all_to_all, check_all_to_all_single),
    "all_gather": (check_all_gather,),
    "all_reduce": (check_all_reduce,),
}
