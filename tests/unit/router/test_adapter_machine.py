"""The whole router without sockets: loads, unloads, joins, losses and lists in any order.

Whatever happens, the two halves of an attempt carry one adapter that both nodes have listed, and
what was unloaded does not come back by a node that was away.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from router.adapters import AdapterCatalogue, AdapterState
from router.errors import ApiError
from router.node import Node
from tests.unit.router.adapter_lab import NAMES, SLOTS, Lab, SimNode


class AdapterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.verbs: list[tuple[str, str, asyncio.Task[Any]]] = []
        self.gone: set[str] = set()
        """Names whose unload has succeeded, with no load of any kind since."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.lab = Lab(seed)
        for slot in SLOTS:
            self.lab.turn(partial(self.lab.join, slot))
        self._quiet()
        for name in NAMES:
            self.load(name)
        self._quiet()
        self._take_results()
        assert not self.verbs

    def _quiet(self) -> None:
        """Everything that was told is done."""
        for _ in range(200):
            busy = [node for node in self.lab.living.values() if node.inbox]
            for node in busy:
                self.lab.turn(partial(self.lab.work, node))
            if not busy:
                return
        raise AssertionError("the cluster does not come to rest")

    def _take_results(self) -> None:
        for verb, name, task in list(self.verbs):
            if not task.done():
                continue
            self.verbs.remove((verb, name, task))
            error = task.exception()
            assert error is None or isinstance(error, ApiError)
            if error is None and verb == "unload":
                self.gone.add(name)

    def _node(self, slot: str) -> SimNode | None:
        return self.lab.is_there(slot)

    # ------------------------------------------------------------ what people do

    @rule(name=st.sampled_from(NAMES))
    def load(self, name: str) -> None:
        verbs = self.lab.service.adapter_verbs
        self.gone.discard(name)
        task = self.lab.turn(
            lambda: self.lab.loop.create_task(verbs.load(name, f"/{name}", pinned=False))
        )
        self.verbs.append(("load", name, task))
        self._take_results()

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        verbs = self.lab.service.adapter_verbs
        task = self.lab.turn(lambda: self.lab.loop.create_task(verbs.unload(name)))
        self.verbs.append(("unload", name, task))
        self._take_results()

    @rule(name=st.sampled_from((None, *NAMES)))
    def submit(self, name: str | None) -> None:
        entry = self.lab.service.adapters.get(name) if name is not None else None
        if name is None or (entry is not None and entry.state is AdapterState.READY):
            self.lab.turn(lambda: self.lab.submit(None if entry is None else entry.adapter))

    @rule(slot=st.sampled_from(SLOTS), name=st.sampled_from(NAMES), fresh=st.booleans())
    def on_one_node(self, slot: str, name: str, fresh: bool) -> None:
        """Its own HTTP, or another router."""
        node = self._node(slot)
        if node is None or node.cut or node.seq < 2:
            return
        if name in node.holds:
            del node.holds[name]
        else:
            self.gone.discard(name)
            node.holds[name] = f"{name}2" if fresh else node.disk[f"/{name}"]
        self.lab.turn(lambda: self.lab.list(node))

    @rule(slot=st.sampled_from(SLOTS), name=st.sampled_from(NAMES))
    def other_content_on_disk(self, slot: str, name: str) -> None:
        node = self._node(slot)
        if node is not None:
            node.disk[f"/{name}"] = (
                f"{name}2" if node.disk[f"/{name}"] == f"{name}1" else f"{name}1"
            )

    # ------------------------------------------------------------ what nodes do

    @rule(slot=st.sampled_from(SLOTS), count=st.integers(1, 6))
    def work(self, slot: str, count: int) -> None:
        for _ in range(count):
            node = self._node(slot)
            if node is not None:
                self.lab.turn(partial(self.lab.work, node))
        self._take_results()

    @rule()
    def come_to_rest(self) -> None:
        self._quiet()
        for node in list(self.lab.living.values()):
            if node.slot[0] == "d" and not node.cut:
                self.lab.turn(partial(self.lab.finish, node))
        self._quiet()
        self._take_results()

    @rule(slot=st.sampled_from(SLOTS), lost=st.booleans())
    def break_link(self, slot: str, lost: bool) -> None:
        """What was on its way to the node is lost, or is there already and will be done."""
        node = self._node(slot)
        if node is not None and not node.cut:
            if lost:
                node.inbox.clear()
            self.lab.turn(lambda: self.lab.lose(node, dead=False))
            self._take_results()

    @rule(slot=st.sampled_from(SLOTS), name=st.sampled_from(NAMES), load=st.booleans())
    def be_away_during_a_verb(self, slot: str, name: str, load: bool) -> None:
        """The verb begins, the link breaks, the other nodes do as they are told, it comes back."""
        (self.load if load else self.unload)(name)
        self.break_link(slot, lost=False)
        self.come_to_rest()
        (self.load if not load else self.unload)(name)
        self.come_to_rest()
        self.come_back(slot)

    @rule(slot=st.sampled_from(SLOTS))
    def come_back(self, slot: str) -> None:
        node = self._node(slot)
        if node is not None and node.cut:
            self.lab.turn(lambda: self.lab.greet(node))

    @rule(slot=st.sampled_from(SLOTS))
    def die(self, slot: str) -> None:
        node = self._node(slot)
        if node is not None:
            self.lab.turn(lambda: self.lab.lose(node, dead=True))
            self._take_results()

    @rule(slot=st.sampled_from(SLOTS))
    def start_anew(self, slot: str) -> None:
        if self._node(slot) is None:
            self.lab.turn(lambda: self.lab.join(slot))

    @precondition(lambda self: hasattr(self, "lab"))
    @rule(slot=st.sampled_from(SLOTS))
    def lose_a_message_up(self, slot: str) -> None:
        node = self._node(slot)
        if node is not None and not node.cut and node.seq >= 2:
            node.seq += 1
            self.lab.turn(lambda: self.lab.list(node))

    # ------------------------------------------------------------ what must hold

    @invariant()
    def what_was_unloaded_stays_unloaded(self) -> None:
        for name in self.gone:
            assert self.lab.service.adapters.get(name) is None, f"{name} is a zombie"

    @invariant()
    def ready_means_one_digest(self) -> None:
        if hasattr(self, "lab"):
            for entry in self.lab.service.adapters.entries():
                assert entry.digest or entry.state is not AdapterState.READY

    def teardown(self) -> None:
        if not hasattr(self, "lab"):
            return
        try:
            self._check_end()
        finally:
            self.lab.close()

    def _check_end(self) -> None:
        """With all nodes back and everything done, nothing is left over."""
        lab = self.lab
        for node in list(lab.living.values()):
            if node.cut:
                lab.turn(partial(lab.greet, node))
        for slot in SLOTS:
            if lab.is_there(slot) is None:
                lab.turn(partial(lab.join, slot))
        for _ in range(8):
            self.come_to_rest()
            lab.now += 10.0
            lab.turn(partial(lab.service._tick, lab.now))
        assert not self.verbs, "a verb does not end"
        assert not len(lab.service.dispatcher), "a request does not end"
        for known in lab.service.registry.all():
            assert known.is_equipped, f"{known.incarnation} takes no work"
        self.what_was_unloaded_stays_unloaded()
        for node in lab.living.values():
            assert not self.gone & set(node.holds), f"{node.incarnation} keeps {node.holds}"


TestAdapterMachine = AdapterMachine.TestCase
TestAdapterMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (AdapterCatalogue, "owe", lambda *_: None),
        (AdapterCatalogue, "note_uncertain", lambda *_: None),
        (Node, "holds", lambda *_: True),
    ],
)
def test_the_machine_notices_what_is_broken(
    owner: type, method: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A debt that is forgotten brings a zombie; a list that is ignored, a pair that differs."""
    monkeypatch.setattr(owner, method, broken)
    quick = settings(
        max_examples=300, stateful_step_count=40, deadline=None, database=None,
        phases=[Phase.generate], report_multiple_bugs=False, derandomize=True,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(AdapterMachine, settings=quick)
