"""What rank 0 of a node says to its other ranks beside batches, transfers and adapters, and they to
it. One connection each, so order is kept."""

import msgspec

from common.config import NodeConfig
from common.messages import Incarnation, PeerMemory


class Setup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First of all: who the rank is. It loads its part, and says `Loaded`."""

    config: NodeConfig
    model: str
    """Folder of the model, resolved."""
    name: str
    """The node's."""
    incarnation: Incarnation
    """The node's."""
    rank: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Meet the others at this port of the loopback, make pool and transfer, and say `Ready`."""

    port: int


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    """Make the passes that rank 0 makes now too."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Nothing more comes."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is in memory; nothing that needs the others was done yet."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Pool and transfer are there, and batches may come."""

    memory: PeerMemory


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank could not start, and ends."""

    error: str


ToRank = Setup | Connect | WarmUp | End
FromRank = Loaded | Ready | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
