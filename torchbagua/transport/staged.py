"""The transport for GPU tensors that sends over a host transport, through pinned memory."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Literal

import torch

from torchbagua.transport.base import Transport, TransportError, bytes_of
from torchbagua.transport.streams import wait_on_host

_Key = tuple[int, Literal["send", "receive", "sum"], int | None]


class StagedTransport(Transport):
    """Sends messages between GPUs, and sums over GPUs, by `host`, each through a separate pinned buffer.

    A buffer is allocated once, for the longest message. All copies run on the current stream of the tensor's GPU.
    """

    def __init__(self, host: Transport, timeout: timedelta) -> None:
        self.name = host.name
        self.abilities = replace(
            host.abilities,
            devices=frozenset({"cuda"}),
            has_torch_group=False,
            collectives=host.abilities.collectives & {"all_reduce"},
        )
        self._host = host
        self._timeout = timeout
        self._buffers: dict[_Key, torch.Tensor] = {}
        self._last_reads: dict[_Key, torch.cuda.Event] = {}
        self._receives: dict[_Key, torch.Tensor] = {}

    def connect(self, peers: Iterable[int] | None) -> None:
        self._host.connect(peers)

    def post_send(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self._host.post_send(peer, self._copy_to_host((tag, "send", peer), tensor), tag)

    def post_receive(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        key: _Key = (tag, "receive", peer)
        self._host.post_receive(peer, self._buffer(key, tensor), tag)
        self._receives[key] = tensor

    def wait_send(self, peer: int, tag: int) -> None:
        self._host.wait_send(peer, tag)

    def wait_receive(self, peer: int, tag: int) -> None:
        self._host.wait_receive(peer, tag)
        key: _Key = (tag, "receive", peer)
        tensor = self._receives.pop(key, None)
        if tensor is not None:
            self._copy_from_host(key, tensor)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        key: _Key = (0, "sum", None)
        on_host = self._copy_to_host(key, tensor)
        self._host.all_reduce(on_host.view(tensor.dtype))
        self._copy_from_host(key, tensor)

    def abort(self) -> None:
        self._receives.clear()

    def _copy_to_host(self, key: _Key, tensor: torch.Tensor) -> torch.Tensor:
        on_host = self._buffer(key, tensor)
        on_host.copy_(bytes_of(tensor), non_blocking=True)
        self._wait_for(torch.cuda.current_stream(tensor.device).record_event(), key[2])
        return on_host

    def _copy_from_host(self, key: _Key, tensor: torch.Tensor) -> None:
        bytes_of(tensor).copy_(self._buffers[key][: tensor.nbytes], non_blocking=True)
        self._last_reads[key] = torch.cuda.current_stream(tensor.device).record_event()

    def _buffer(self, key: _Key, tensor: torch.Tensor) -> torch.Tensor:
        """Return pinned memory for the bytes of `tensor`, once its earlier contents have been read."""
        if (last_read := self._last_reads.pop(key, None)) is not None:
            self._wait_for(last_read, key[2])
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < tensor.nbytes:
            buffer = self._buffers[key] = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        return buffer[: tensor.nbytes]

    def _wait_for(self, mark: torch.cuda.Event, peer: int | None) -> None:
        try:
            wait_on_host(mark, self._timeout.total_seconds())
        except TimeoutError as error:
            raise TransportError(str(error), peer) from error
