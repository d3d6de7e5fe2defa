"""One choice on its way from tokens to text: what the client gets of each batch of tokens."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from common.messages import StopReason, TokenLogprob
from router.detokenizer import Decoder, StopMatcher, make_detokenizer
from router.requests import NewTokens
from router.tools.calls import CallDelta
from router.tools.options import CallOptions
from router.tools.parser import CallParser


class Finish(StrEnum):
    """Why a choice ended, as every API spells it."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """Like STOP, after whole calls of functions."""
    ABORT = "abort"


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens become text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings do not count before."""
    prompt_only: bool = False
    """Only the prompt is asked about: the token that nodes must draw is no part of the answer."""
    calls: CallOptions | None = None
    """Calls of functions are looked for in the text."""

    @property
    def may_end_early(self) -> bool:
        """Whether the text can end before the node says so."""
        return bool(self.stops) or (self.calls is not None and self.calls.max_calls is not None)


class TokenRecord(msgspec.Struct, frozen=True):
    """A token with its logprob and the place of its text in the choice's text."""

    token_id: int
    logprob: TokenLogprob
    offset: int


class Delta(msgspec.Struct):
    """What is new of one choice."""

    choice: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenRecord] = ()
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    """Of prompt tokens 1, 2, ..., in the first delta of a choice that asked for them."""
    finish: Finish | None = None
    matched: str | int | None = None
    """The stop string or the stop token that ended it."""
    message: str = ""
    """Why it was aborted."""
    calls: Sequence[CallDelta] = ()
    """What is new of calls of functions; it comes after the text."""


class TextStream:
    """The text of one choice; ends once."""

    def __init__(self, choice: int, codec: Decoder, options: TextOptions) -> None:
        self._choice = choice
        self._options = options
        self._detokenizer = make_detokenizer(codec, skip_special_tokens=options.skip_special_tokens)
        self._matcher = StopMatcher(options.stops, include=options.include_stop)
        calls = options.calls
        self._calls = None if calls is None else calls.new_parser()
        self._markers = calls.markers if calls is not None and options.skip_special_tokens else {}
        self._is_plain = not options.stops and calls is None
        self._decoded = 0
        self.num_tokens = 0
        """Output tokens up to the end that the client sees."""
        self.finish: Finish | None = None
        self.matched: str | int | None = None

    def feed(self, output: NewTokens) -> Delta:
        """Take in new tokens, up to a stop string."""
        token_ids = output.token_ids
        scored = output.logprobs is not None or output.prompt_logprobs is not None
        if self._is_plain and output.finish is None and not scored:
            # What most steps bring: nothing can end here, and nothing is said of single tokens.
            feed = self._detokenizer.feed
            text = feed(token_ids[0]) if len(token_ids) == 1 else "".join(map(feed, token_ids))
            self.num_tokens += len(token_ids)
            self._decoded += len(text)
            return Delta(self._choice, text, token_ids)
        return self._feed_each(output)

    def _feed_each(self, output: NewTokens) -> Delta:
        delta = Delta(self._choice, prompt_logprobs=output.prompt_logprobs)
        if self._options.prompt_only:
            self.finish = delta.finish = Finish.LENGTH
            return delta
        texts: list[str] = []
        records: list[TokenRecord] = []
        taken = 0
        for i, token_id in enumerate(output.token_ids):
            taken += 1
            self.num_tokens += 1
            last = output.finish is not None and i == len(output.token_ids) - 1
            stopped = last and output.finish is StopReason.STOP
            if output.logprobs is not None:
                records.append(TokenRecord(token_id, output.logprobs[i], self._decoded))
            text = ""
            if not stopped or self._options.include_stop:
                text = self._markers.get(token_id) or self._detokenizer.feed(token_id)
            self._decoded += len(text)
            texts.append(self._through(text))
            if self._matcher.matched is not None:
                break
        if self._matcher.matched is not None:
            self.finish, self.matched = Finish.STOP, self._matcher.matched
        elif output.finish is not None:
            self._finish(output, texts)
        delta.text = "".join(texts)
        delta.token_ids = output.token_ids[:taken]
        delta.logprobs = records
        if self._calls is not None:
            self._split(self._calls, delta)
        delta.finish, delta.matched = self.finish, self.matched
        return delta

    def abort(self, message: str) -> Delta:
        """End now, with all text that is held back."""
        text = self._matcher.pass_through(self._detokenizer.flush())
        self.finish = Finish.ABORT
        delta = Delta(self._choice, text, finish=Finish.ABORT, message=message)
        if self._calls is not None:
            self._split(self._calls, delta)
        return delta

    def _split(self, parser: CallParser, delta: Delta) -> None:
        """Take calls out of the text; with as many as were wanted it ends."""
        parsed = parser.feed(delta.text)
        delta.text, delta.calls = parsed.content, parsed.calls
        if parser.satisfied and self.finish is not Finish.ABORT:
            self.finish = Finish.STOP
        if self.finish is None:
            return
        rest = parser.finish()
        delta.text += rest.content
        by_name = self._options.calls is not None and self._options.calls.by_name
        if self.finish is Finish.STOP and parser.called and not by_name:
            self.finish = Finish.TOOL_CALLS

    def _through(self, text: str) -> str:
        if self.num_tokens <= self._options.min_tokens:
            return self._matcher.pass_through(text)
        return self._matcher.feed(text)

    def _finish(self, output: NewTokens, texts: list[str]) -> None:
        texts.append(self._matcher.feed(self._detokenizer.flush()))
        if self._matcher.matched is not None:
            self.finish, self.matched = Finish.STOP, self._matcher.matched
            return
        texts.append(self._matcher.flush())
        if output.finish is StopReason.LENGTH:
            self.finish = Finish.LENGTH
            return
        self.finish = Finish.STOP
        if output.token_ids:
            self.matched = output.token_ids[-1]
