"""Checks grammars in a process of its own: `python -m common.grammar.check_server FOLDER SIZE`.

What a user sends can keep the library busy for minutes, make it take all memory, or overflow its
stack, which ends the process. So the process that a user reaches, the router, compiles nothing:

    router  ── question, a JSON line ─▶  this server  ── fork ─▶  one check, then its end
            ◀─ answer, a JSON line ────               ◀─ pipe ──

Each check has a processor-time, a memory and a stack limit, and the kernel ends what exceeds them.
The server keeps the vocabulary, which takes long to make; forks inherit it. It asks for nothing
else, and ends when its standard input does.
"""

import os
import resource
import selectors
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Never

import msgspec

from common.grammar.errors import GrammarError
from common.grammar.limits import CHECK_CPU_S, CHECK_MEMORY_BYTES, CHECK_STACK_BYTES
from common.grammar.matcher import try_out
from common.grammar.questions import Answer, Question
from common.grammar.vocabulary import Vocabulary, load_vocabulary

_INTERNAL_GRACE_S = 0.1
"""Processor time on top of the check's, for what is not the library."""
_READ_BYTES = 1 << 16


@dataclass(slots=True)
class _Running:
    """A fork at work."""

    number: int
    pid: int
    received: bytearray


def main(folder: str, size: str) -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the router's to handle
    try:
        vocabulary = load_vocabulary(Path(folder), int(size))
    except GrammarError as error:
        _refuse_all(str(error))
    else:
        _Server(vocabulary).serve()


def _refuse_all(problem: str) -> None:
    """No grammar can be used with this model."""
    for line in sys.stdin.buffer:
        _write(Answer(msgspec.json.decode(line, type=Question).number, None, problem))


class _Server:
    """Forks a check for each question."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, _Running] = {}
        self._unread = bytearray()

    def serve(self) -> None:
        stdin = sys.stdin.fileno()
        self._selector.register(stdin, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fd != stdin:
                    self._hear(key.fd)
                elif not self._ask():
                    return

    def _ask(self) -> bool:
        """Start what was asked for; False at the end of the input."""
        data = os.read(sys.stdin.fileno(), _READ_BYTES)
        if not data:
            for running in self._running.values():
                os.kill(running.pid, signal.SIGKILL)
            return False
        self._unread += data
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        for line in lines:
            self._fork(msgspec.json.decode(line, type=Question))
        return True

    def _fork(self, question: Question) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _check_and_end(question, self._vocabulary, writing)
        os.close(writing)
        self._running[reading] = _Running(question.number, pid, bytearray())
        self._selector.register(reading, selectors.EVENT_READ)

    def _hear(self, fd: int) -> None:
        """Take in what a fork says; when it has ended, answer."""
        running = self._running[fd]
        data = os.read(fd, _READ_BYTES)
        if data:
            running.received += data
            return
        self._selector.unregister(fd)
        os.close(fd)
        del self._running[fd]
        _, status = os.waitpid(running.pid, 0)
        if running.received.endswith(b"\n"):
            os.write(1, running.received)
        else:
            _write(Answer(running.number, None, _cause(os.waitstatus_to_exitcode(status))))


def _cause(code: int) -> str:
    """Why a fork died without a word."""
    match -code:
        case signal.SIGPROF:
            return "it takes too long to compile"
        case signal.SIGSEGV | signal.SIGBUS:
            return "it is nested too deeply"
        case signal.SIGABRT | signal.SIGKILL:
            return "it takes too much memory to compile"
        case _:
            return "it cannot be compiled"


# ---------------------------------------------------------------- inside a fork


def _check_and_end(question: Question, vocabulary: Vocabulary, writing: int) -> Never:
    """Never returns to the server's code, whatever happens."""
    try:
        _limit()
        threading.stack_size(CHECK_STACK_BYTES)
        thread = threading.Thread(target=_check, args=(question, vocabulary, writing))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def _limit() -> None:
    """What exceeds this is ended by the kernel, also in the middle of the library."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_S + _INTERNAL_GRACE_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a stack's overflow is announced there
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    limit = used + CHECK_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _check(question: Question, vocabulary: Vocabulary, writing: int) -> None:
    try:
        answer = Answer(question.number, try_out(question.grammar, vocabulary))
    except (GrammarError, MemoryError) as error:
        answer = Answer(question.number, None, str(error) or "it takes too much memory to compile")
    _write(answer, writing)


def _write(answer: Answer, fd: int = 1) -> None:
    data = msgspec.json.encode(answer) + b"\n"
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main(*sys.argv[1:])
