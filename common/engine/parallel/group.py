"""What the ranks of a node do together: sums and gathers in the middle of a forward pass.

Every rank makes the same calls in the same order. A rank that is gone, or that does not come within
`timeout_s`, makes the call raise on all others, and the group is broken for good: there is no way
to tell which ranks took part in what. So an error here ends the node.

`torch.distributed` over NCCL between GPUs and over gloo between CPUs. Ranks are on one machine, and
everything they listen at is on its loopback.
"""

import os
import socket
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

LOOPBACK = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Group(Protocol):
    """The ranks that share a model, as one of them sees them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_(self, x: Tensor) -> None:
        """Replace `x` by the sum of all ranks' `x`, which have one shape and dtype."""
        ...

    def join_columns(self, x: Tensor, columns: int) -> Tensor:
        """[rows, columns], on every rank: all ranks' `x` [rows, ...] side by side.

        Each rank but the last ones has `ceil(columns / size)` columns, these have what is left.
        """
        ...

    def share_(self, x: Tensor) -> None:
        """Replace `x`, of one shape and dtype on all ranks, by what rank 0 has."""
        ...

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        ...


class Alone:
    """A model in one process."""

    rank = 0
    size = 1

    def sum_(self, x: Tensor) -> None:
        """It is the sum."""

    def join_columns(self, x: Tensor, columns: int) -> Tensor:
        assert x.shape[-1] == columns
        return x

    def share_(self, x: Tensor) -> None:
        """Nobody else has one."""

    def least(self, number: int) -> int:
        return number


ALONE = Alone()


class RankGroup:
    """`Group` over torch's default process group; made before the model, connected before a pass.

    One thread at a time uses it, always the engine's.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._device = torch.device("cpu")

    def connect(
        self,
        device: torch.device,
        port: int,
        timeout_s: float,
        listening: socket.socket | None = None,
    ) -> None:
        """Meet the others at rank 0's `port`; rank 0 itself is `listening` there (`meeting_point`).

        `device` is this rank's, and what it shares with the others is on it.

        Raises RuntimeError (of torch) when they do not all come within `timeout_s`.
        """
        assert (listening is not None) == (self.rank == 0), "rank 0 is where the others meet"
        self._device = device
        for variable in _INTERFACES:
            os.environ.setdefault(variable, "lo")
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK,
            port,
            self.size,
            is_master=listening is not None,
            timeout=timeout,
            # Its own socket would listen on every interface.
            master_listen_fd=None if listening is None else listening.detach(),
        )
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )

    def sum_(self, x: Tensor) -> None:
        dist.all_reduce(x)

    def join_columns(self, x: Tensor, columns: int) -> Tensor:
        piece = -(-columns // self.size)
        mine = functional.pad(x, (0, piece - x.shape[1])).contiguous()
        joined = x.new_empty(self.size, x.shape[0], piece)
        dist.all_gather(list(joined.unbind()), mine)
        return joined.transpose(0, 1).reshape(x.shape[0], -1)[:, :columns]

    def share_(self, x: Tensor) -> None:
        dist.broadcast(x, src=0)

    def least(self, number: int) -> int:
        found = torch.tensor(number, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def close(self) -> None:
        """Let go of connections and threads; harmless if there are none."""
        if dist.is_initialized():
            dist.destroy_process_group()


def meeting_point() -> tuple[socket.socket, int]:
    """A socket that listens on a free port of the loopback, for rank 0's `connect`."""
    listening = socket.create_server((LOOPBACK, 0))
    return listening, listening.getsockname()[1]
