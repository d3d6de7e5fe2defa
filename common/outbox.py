"""What a scheduler has decided to say since its last plan, in order."""

from common.messages import Incarnation, ToDecode, TokenOutput, Tokens, ToPrefill, ToRouter
from common.plan import (
    CacheChanged,
    DialPeer,
    ExpectWrites,
    HangUp,
    Outgoing,
    ProbePeer,
    ToPeerMsg,
    ToRouterMsg,
    TransferCommand,
)


class Outbox:
    """Collects messages and transfer commands; tokens are batched, one message a router a step.

    Order per router is kept: a batch of tokens is closed before any other message to that router,
    so `Retracted` always follows the tokens emitted before it.
    """

    def __init__(self) -> None:
        self._messages: list[Outgoing] = []
        self._transfers: list[TransferCommand] = []
        self._tokens: dict[Incarnation, list[TokenOutput]] = {}
        self._expecting = False

    def tokens(self, router: Incarnation, output: TokenOutput) -> None:
        self._tokens.setdefault(router, []).append(output)

    def to_router(self, router: Incarnation, body: ToRouter) -> None:
        self._close_tokens(router)
        self._messages.append(ToRouterMsg(router, body))

    def to_peer(self, peer: Incarnation, link: int, body: ToPrefill | ToDecode) -> None:
        self._messages.append(ToPeerMsg(peer, link, body))

    def dial(self, peer: Incarnation, address: str, link: int) -> None:
        self._messages.append(DialPeer(peer, address, link))

    def hang_up(self, peer: Incarnation, link: int) -> None:
        self._messages.append(HangUp(peer, link))

    def probe(self, peer: Incarnation, address: str) -> None:
        self._messages.append(ProbePeer(peer, address))

    def cache_changed(self, change: CacheChanged | None) -> None:
        if change is not None:
            self._messages.append(change)

    def transfer(self, command: TransferCommand) -> None:
        self._transfers.append(command)

    def expect_writes(self, on: bool) -> None:
        """Hint to the transfer backend, when it changes: peers' writes are due, or none is."""
        if on != self._expecting:
            self._expecting = on
            self._transfers.append(ExpectWrites(on))

    def drain(self) -> tuple[tuple[TransferCommand, ...], tuple[Outgoing, ...]]:
        """Everything so far, and start anew."""
        for router in tuple(self._tokens):
            self._close_tokens(router)
        transfers, messages = tuple(self._transfers), tuple(self._messages)
        self._transfers.clear()
        self._messages.clear()
        return transfers, messages

    def _close_tokens(self, router: Incarnation) -> None:
        outputs = self._tokens.pop(router, None)
        if outputs:
            self._messages.append(ToRouterMsg(router, Tokens(outputs)))
