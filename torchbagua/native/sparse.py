"""Code shared by the sparse codecs, in plain torch: some elements of a block are sent in 8 bits; docs/arithmetic.md."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from torchbagua.native.block_format import NARROWEST, Group, TableFormat, is_usable, round_half_even
from torchbagua.native.ops import SPARSE_TABLE

LONGEST_BLOCK = 4096
LARGEST_CODE = 127


class SparseFormat(TableFormat):
    """The largest sent magnitude, float32, in the header; then the indices of the sent elements, and a byte for each.

    A subclass selects the elements to send.
    """

    header_bytes = 4
    table = SPARSE_TABLE

    @abstractmethod
    def index_sizes(self, table: Tensor) -> Tensor:
        """Return the bytes that the indices take in the payload of each block of a table."""

    @abstractmethod
    def most_index_bytes(self, block: int, kept: int, num_blocks: int, most_kept: int) -> int:
        """Return the maximum index bytes of blocks that send `kept` of `block` elements each, `most_kept` in total."""

    @abstractmethod
    def choose(self, group: Group, values_kl: Tensor) -> Tensor:
        """Return the ascending indices [K, N] int64 to send of blocks [K, L] float32; any indices if not encodable."""

    @abstractmethod
    def pack(self, group: Group, indices_kn: Tensor) -> Tensor:
        """Return the bytes [K, I] uint8 of indices."""

    @abstractmethod
    def unpack(self, group: Group, bytes_ki: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices [K, N] in such bytes, and whether an encoder can have written them, [K, 1] bool."""

    def allowed_rows(self) -> str:
        return (
            f"rows (start, length from 1 to {LONGEST_BLOCK}, header at a multiple of 4, payload, kept from 1 to length)"
        )

    def are_allowed(self, table: Tensor) -> Tensor:
        length, kept = table[:, 1], table[:, 4]
        return super().are_allowed(table) & (length <= LONGEST_BLOCK) & (kept >= 1) & (kept <= length)

    def payload_sizes(self, table: Tensor) -> Tensor:
        return self.index_sizes(table) + table[:, 4]

    def write(self, wire: Tensor, group: Group, values_kl: Tensor) -> None:
        magnitudes_kl = values_kl.view(torch.int32) & 0x7FFFFFFF
        indices_kn = self.choose(group, values_kl)
        usable = is_usable(magnitudes_kl.amax(dim=1, keepdim=True).view(torch.float32))
        largest_k1 = magnitudes_kl.gather(1, indices_kn).amax(dim=1, keepdim=True).view(torch.float32)
        is_narrow = largest_k1 < NARROWEST
        inverse_k1 = torch.where(is_narrow, 0.0, torch.div(torch.full_like(largest_k1, LARGEST_CODE), largest_k1))
        scaled_kn = torch.where(usable, values_kl.gather(1, indices_kn), 0.0) * inverse_k1
        codes_kn = round_half_even(scaled_kn) + 128.0
        payload_kp = torch.cat((self.pack(group, indices_kn), codes_kn.to(torch.uint8)), dim=1)
        wire[group.header] = torch.where(usable, largest_k1, torch.nan).view(torch.uint8)
        wire[group.payload] = torch.where(usable, payload_kp, 0)

    def read(self, wire: Tensor, group: Group) -> Tensor:
        length = group.elements.shape[1]
        largest_k1 = wire[group.header].view(torch.float32)
        payload_kp = wire[group.payload]
        indices_kn, good_k1 = self.unpack(group, payload_kp[:, : -group.kept])
        good_k1 = good_k1 & is_usable(largest_k1)
        steps_k1 = torch.div(largest_k1, torch.full_like(largest_k1, LARGEST_CODE))
        step_k1 = torch.where(largest_k1 < NARROWEST, 0.0, steps_k1)
        decoded_kn = (payload_kp[:, -group.kept :].to(torch.float32) - 128.0) * step_k1 + 0.0  # -0 becomes +0
        values_kl = torch.zeros(len(payload_kp), length, device=wire.device)
        values_kl.scatter_(1, torch.where(good_k1, indices_kn, 0), decoded_kn)
        return torch.where(good_k1, values_kl, torch.nan)
