"""A step's numbers on their way to the device and back.

    host   [ token ids | positions | slots | guessed | ... | page table changes ]   one of two
                                   │ one copy, of what is used
    device [ the same places ]                                                       always the same

The device's tensor is read and written by one stream, in order, so one is enough. The host's is
filled while an earlier step's copy may not have begun: there are two, and a step takes the one that
the step before the last had, which was taken in by then (`Runner.launch`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.cuda.stream import Stream

NUM_HOST_BUFFERS = 2


class Parcel:
    """The numbers of one step. `put` them, then `send`."""

    def __init__(self, host: Tensor, device: Tensor, answers: Tensor) -> None:
        self._host = host
        self._values = host.numpy()
        self._device = device
        self._answers = answers
        self._used = 0
        self._beside: list[tuple[Tensor, Tensor]] = []

    def put(self, values: Sequence[int], room: int | None = None) -> Tensor:
        """Where `values` will be on the device, [len(values)] int64, once they are sent.

        `room`: how many places they take, so that what comes next has the same place in each step.
        """
        count = len(values)
        first, last = self._used, self._used + (count if room is None else room)
        assert room is None or count <= room, f"{count} numbers, and room for {room}"
        if last > len(self._host):  # never a decode step's: somebody brings a great many pages
            return self._put_beside(values)
        self._values[first : first + count] = values
        self._used = last
        return self._device[first : first + count]

    def _put_beside(self, values: Sequence[int]) -> Tensor:
        host = torch.tensor(values, dtype=torch.int64)
        if self._device.device.type == "cuda":
            host = host.pin_memory()  # torch keeps it until the copy is done
        target = torch.empty(len(values), dtype=torch.int64, device=self._device.device)
        self._beside.append((target, host))
        return target

    def send(self) -> None:
        """Copy what was put. A part of the submitted work."""
        self._device[: self._used].copy_(self._host[: self._used], non_blocking=True)
        for target, host in self._beside:
            target.copy_(host, non_blocking=True)

    def fetch(self, tokens: Tensor) -> None:
        """Copy `tokens` to the host. A part of the submitted work."""
        self._answers[: len(tokens)].copy_(tokens, non_blocking=True)

    def fetched(self, count: int) -> list[int]:
        """What was fetched, once the step is done."""
        tokens: list[int] = self._answers[:count].tolist()
        return tokens


class Staging:
    """Makes the parcels of one runner."""

    def __init__(self, stream: Stream, device: torch.device, size: int, max_answers: int) -> None:
        """`size`: numbers in a step, beyond which a step takes a copy more."""
        self._host = [stream.host_buffer(size) for _ in range(NUM_HOST_BUFFERS)]
        self._answers = [stream.host_buffer(max_answers) for _ in range(NUM_HOST_BUFFERS)]
        self.numbers = torch.zeros(size, dtype=torch.int64, device=device)
        """[size] on the device: the first places of a parcel are the first ones here."""
        self._next = 0

    def parcel(self) -> Parcel:
        """For the next step; the one before the last must have been taken in."""
        at, self._next = self._next, (self._next + 1) % NUM_HOST_BUFFERS
        return Parcel(self._host[at], self.numbers, self._answers[at])
