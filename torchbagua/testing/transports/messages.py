"""Checks of messages: contents, dtypes, tags, order, and the allowed actions of a sender and a receiver."""

import time

import torch

from torchbagua.testing.transports.member import Member, SuiteThread
from torchbagua.transport.base import Transport, TransportError

_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def check_connect(member: Member) -> None:
    """Members connect to their neighbors, to the same neighbors again, and then to all; messages arrive each time."""
    transport = member.open(is_connected=False)
    transport.use_device(member.device_of(transport.abilities))
    neighbours = sorted({member.after, member.before})
    for peers in (neighbours, neighbours, None):
        transport.connect(peers)
        member.exchange(transport, neighbours)
    member.exchange(transport, member.peers)


def check_message_bits(member: Member) -> None:
    """Messages of 1 byte to 1 MiB arrive in a part of a tensor, and the bytes around them do not change."""
    transport = member.open()
    for num_bytes in (1, 2, 3, 31, 4096, (1 << 20) + 1):
        memory = member.zeros(transport, num_bytes + 8)
        sent = member.message(transport, member.rank, member.after, num_bytes + 8)
        _pass_around(member, transport, sent[5 : 5 + num_bytes], memory[3 : 3 + num_bytes])
        expected = torch.zeros_like(memory)
        source = member.message(transport, member.before, member.rank, num_bytes + 8)
        expected[3 : 3 + num_bytes] = source[5 : 5 + num_bytes]
        subject = f"message of {num_bytes} bytes from rank {member.before}, with 8 bytes around it"
        member.expect_bits(subject, memory, expected)


def check_dtypes(member: Member) -> None:
    """Messages of each dtype arrive bitwise unchanged, including NaN, subnormal numbers and single elements."""
    transport = member.open()
    for dtype in _DTYPES:
        for num_elements in (1, 17):
            num_bytes = num_elements * dtype.itemsize
            sent = _with_dtype(member.message(transport, member.rank, member.after, num_bytes), dtype)
            received = member.zeros(transport, num_elements, dtype)
            _pass_around(member, transport, sent, received)
            expected = _with_dtype(member.message(transport, member.before, member.rank, num_bytes), dtype)
            subject = f"message of {num_elements} elements of {dtype} from rank {member.before}"
            member.expect_bits(subject, received, expected)


def _with_dtype(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return message % 2 == 0 if dtype == torch.bool else message.view(dtype)


def check_sent_tensor_stays(member: Member) -> None:
    """A transport does not write to a tensor that it sends."""
    transport = member.open()
    sent = member.message(transport, member.rank, member.after, 5000)
    _pass_around(member, transport, sent, member.zeros(transport, 5000))
    expected = member.message(transport, member.rank, member.after, 5000)
    member.expect_bits(f"tensor sent to rank {member.after}, after wait_send", sent, expected)


def check_sent_tensor_is_free(member: Member) -> None:
    """A sender may overwrite its tensor after `wait_send` returns, even if the receiver waits later."""
    transport = member.open()
    for num_bytes in (5, 1 << 20):
        sent = member.message(transport, member.rank, member.after, num_bytes)
        received = member.zeros(transport, num_bytes)
        transport.post_receive(member.before, received, 0)
        transport.post_send(member.after, sent, 0)
        transport.wait_send(member.after, 0)
        sent.zero_()
        member.meet()
        transport.wait_receive(member.before, 0)
        expected = member.message(transport, member.before, member.rank, num_bytes)
        subject = f"message from rank {member.before}, which has overwritten its tensor after wait_send"
        member.expect_bits(subject, received, expected)


def check_late_send(member: Member) -> None:
    """`wait_receive` returns only after the message has arrived, even if its sender posts it later."""
    transport = member.open()
    received = member.zeros(transport, 1000)
    transport.post_receive(member.before, received, 0)
    member.meet()
    if member.rank % 2:
        time.sleep(member.deadline_s / 2)
    transport.post_send(member.after, member.message(transport, member.rank, member.after, 1000), 0)
    transport.wait_receive(member.before, 0)
    expected = member.message(transport, member.before, member.rank, 1000)
    member.expect_bits(f"message from rank {member.before}, at the end of wait_receive", received, expected)
    transport.wait_send(member.after, 0)


def check_late_receive(member: Member) -> None:
    """A message sent before its receive is posted arrives."""
    transport = member.open()
    for num_bytes in (1, 1 << 20):
        sent = member.message(transport, member.rank, member.after, num_bytes)
        received = member.zeros(transport, num_bytes)
        transport.post_send(member.after, sent, 0)
        member.meet()
        transport.post_receive(member.before, received, 0)
        transport.wait_receive(member.before, 0)
        expected = member.message(transport, member.before, member.rank, num_bytes)
        member.expect_bits(f"message from rank {member.before}, sent before its receive was posted", received, expected)
        transport.wait_send(member.after, 0)


def check_tags(member: Member) -> None:
    """Tags distinguish messages to one peer, regardless of the order of posts and waits."""
    transport = member.open()
    tags = (0, 5, 1, 4001)
    sent = {tag: member.message(transport, member.rank, member.after, 100, tag) for tag in tags}
    received = {tag: member.zeros(transport, 100) for tag in tags}
    for tag in tags:
        transport.post_send(member.after, sent[tag], tag)
    for tag in sorted(tags):
        transport.post_receive(member.before, received[tag], tag)
    for tag in reversed(tags):
        transport.wait_receive(member.before, tag)
        expected = member.message(transport, member.before, member.rank, 100, tag)
        member.expect_bits(f"message from rank {member.before} with tag {tag} of {list(tags)}", received[tag], expected)
    for tag in sorted(tags):
        transport.wait_send(member.after, tag)


def check_order(member: Member) -> None:
    """Messages with the same tag, each sent after `wait_send` of the message before, arrive in order."""
    transport = member.open()
    lengths = range(1, 60)
    for length in lengths:
        received = member.zeros(transport, length)
        _pass_around(member, transport, member.message(transport, member.rank, member.after, length), received)
        expected = member.message(transport, member.before, member.rank, length)
        member.expect_bits(f"message {length} of {len(lengths)} from rank {member.before}", received, expected)


def check_all_pairs(member: Member) -> None:
    """All members send several messages, with different tags, to all other members at the same time."""
    transport = member.open()
    tags = range(3)
    received = {(peer, tag): member.zeros(transport, 70_000) for peer in member.peers for tag in tags}
    sent = {(peer, tag): member.message(transport, member.rank, peer, 70_000, tag) for peer, tag in received}
    for (peer, tag), tensor in received.items():
        transport.post_receive(peer, tensor, tag)
    for (peer, tag), tensor in sent.items():
        transport.post_send(peer, tensor, tag)
    for (peer, tag), tensor in received.items():
        transport.wait_receive(peer, tag)
        expected = member.message(transport, peer, member.rank, 70_000, tag)
        member.expect_bits(f"message from rank {peer} with tag {tag}, among all pairs", tensor, expected)
    for peer, tag in reversed(sent):
        transport.wait_send(peer, tag)


def check_wait_for_nothing(member: Member) -> None:
    """A wait returns if no message was posted with its arguments, or if an earlier wait completed the message."""
    transport = member.open()
    transport.wait_receive(member.before, 3)
    transport.wait_send(member.after, 3)
    for _ in range(2):
        member.exchange(transport, member.peers, tag=3)
        transport.wait_receive(member.before, 3)
        transport.wait_send(member.after, 3)


def check_twin(member: Member) -> None:
    """A twin communicates concurrently on another thread, with other tags. A transport may have no twin."""
    transport = member.open()
    try:
        twin = member.twin_of(transport)
    except TransportError:
        return

    def use_twin() -> None:
        for number in range(20):
            member.exchange(twin, member.peers, num_bytes=1 + 1000 * number, tag=101)

    thread = SuiteThread(use_twin, "uses a twin")
    thread.start()
    for number in range(20):
        member.exchange(transport, member.peers, num_bytes=1 + 1000 * (20 - number), tag=100)
    thread.join()
    if thread.error is not None:
        raise thread.error


def _pass_around(member: Member, transport: Transport, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Send to the next member and receive from the previous member."""
    transport.post_receive(member.before, received, 0)
    transport.post_send(member.after, sent, 0)
    transport.wait_receive(member.before, 0)
    transport.wait_send(member.after, 0)


MESSAGE_CHECKS = (
    check_message_bits,
    check_connect,
    check_dtypes,
    check_sent_tensor_stays,
    check_sent_tensor_is_free,
    check_late_send,
    check_late_receive,
    check_tags,
    check_order,
    check_all_pairs,
    check_wait_for_nothing,
    check_twin,
)
