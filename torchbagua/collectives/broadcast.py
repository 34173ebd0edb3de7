"""Broadcasts from rank 0 to all other ranks: the state with which all ranks start."""

import io
from collections.abc import Iterable
from typing import Any

import torch

from torchbagua.transport.communicator import Communicator, Direction

_TAG = 32_767  # above those of exchanges; MPI guarantees 15 bits


def broadcast_tensors(communicator: Communicator, tensors: Iterable[torch.Tensor], purpose: str) -> None:
    """Replace `tensors` by rank 0's, in place. Observers are not notified.

    All ranks pass tensors of the same shapes and dtypes.

    Raises:
        CommunicationError: a peer disconnected or did not take part within the group's timeout.
    """
    operation = f"broadcast of {purpose} by rank {communicator.ranks[0]}"
    with torch.no_grad():
        for tensor in tensors:
            # As bytes, since a transport may not support every dtype; a copy, since weights need not be contiguous.
            values = tensor.detach().contiguous().to("cpu", copy=True)
            _broadcast(communicator, values.view(-1).view(torch.uint8), operation)
            tensor.copy_(values)


def _broadcast(communicator: Communicator, values: torch.Tensor, operation: str) -> None:
    """Replace `values` by rank 0's in log2(n) turns, in each of which every rank with the values sends them to another.

    A backend's own broadcast connects ranks without the knowledge of `Communicator.connect`, and its errors name no
    peer.
    """
    if not communicator.posts_messages(values.device):
        _broadcast_by_collectives(communicator, values, operation)
        return
    rank, distance = communicator.rank, 1
    while distance < communicator.size:
        direction: Direction | None = None
        if rank < distance and rank + distance < communicator.size:
            direction, peer = "sending to", rank + distance
        elif distance <= rank < 2 * distance:
            direction, peer = "receiving from", rank - distance
        if direction is not None:
            communicator.connect([peer], operation, values.device)
            communicator.post(direction, peer, values, tag=_TAG, purpose=operation)
            communicator.wait(direction, peer, tag=_TAG, purpose=operation)
        distance *= 2


def _broadcast_by_collectives(communicator: Communicator, values: torch.Tensor, operation: str) -> None:
    """Replace `values` by rank 0's: each rank receives one chunk from rank 0, and then all ranks gather the chunks.

    A gather of the values of all ranks would need memory for each rank's copy.
    """
    size, length = communicator.size, -(-len(values) // communicator.size)
    if size == 1 or not length:
        return
    padded = values.new_zeros(size * length)
    padded[: len(values)] = values
    received = torch.empty_like(padded)
    communicator.all_to_all_single(received, padded, operation, tuple)
    communicator.all_gather_into_tensor(padded, received[:length], operation, tuple)
    values.copy_(padded[: len(values)])


def broadcast_state(communicator: Communicator, state: dict[str, Any], purpose: str) -> dict[str, Any]:
    """Return rank 0's `state`, which contains plain tensors and numbers."""
    buffer = io.BytesIO()
    if communicator.rank == 0:
        torch.save(state, buffer)
    num_bytes = torch.tensor([buffer.tell()])
    broadcast_tensors(communicator, [num_bytes], purpose)
    blob = bytearray(buffer.getvalue() or int(num_bytes))
    broadcast_tensors(communicator, [torch.frombuffer(blob, dtype=torch.uint8)], purpose)
    # Load on rank 0 too, so that a state with other objects fails on all ranks.
    received: dict[str, Any] = torch.load(io.BytesIO(blob), weights_only=True)
    return received
