"""The catalogue of adapters, case by case; any order of events is in `test_adapter_machine`."""

from functools import partial

import pytest

from common.messages import Adapter, AdapterInfo
from router.adapters import REMEMBERED, AdapterCatalogue, AdapterState
from router.errors import ApiError


def info(name: str, digest: str = "1") -> AdapterInfo:
    return AdapterInfo(name=name, digest=digest, path=f"/{name}", rank=8)


def with_nodes(**listed: list[AdapterInfo]) -> AdapterCatalogue:
    catalogue = AdapterCatalogue()
    for node, infos in listed.items():
        catalogue.on_list(node, infos)
    return catalogue


def lacking(catalogue: AdapterCatalogue, node: str) -> list[str]:
    return [entry.name for entry in catalogue.lacking(node)]


def digest(catalogue: AdapterCatalogue, name: str) -> str | None:
    entry = catalogue.get(name)
    return None if entry is None else entry.digest


def test_a_router_learns_from_nodes_and_gives_to_those_that_lack() -> None:
    catalogue = with_nodes(p=[info("a")], d=[])
    assert catalogue.serves(Adapter("a", "1"))
    assert not catalogue.serves(Adapter("a", "2"))
    assert (lacking(catalogue, "p"), lacking(catalogue, "d")) == ([], ["a"])


def test_the_first_content_counts_while_a_node_has_it() -> None:
    catalogue = with_nodes(p=[info("a", "1")], d=[info("a", "2")])
    assert (digest(catalogue, "a"), catalogue.mismatches) == ("1", 1)
    assert lacking(catalogue, "d") == []  # it would refuse: the name is taken there
    catalogue.on_list("p", [])
    assert digest(catalogue, "a") == "2"
    catalogue.on_list("d", [])
    assert digest(catalogue, "a") is None


def test_other_content_counts_once_the_last_node_of_the_first_is_lost() -> None:
    catalogue = with_nodes(p=[info("a", "1")], d=[info("a", "2")])
    catalogue.on_loss("p")
    assert digest(catalogue, "a") == "2"
    assert not catalogue.expects(Adapter("a", "1"))


def test_what_somebody_unloaded_on_a_node_is_not_given_back_to_it() -> None:
    catalogue = with_nodes(p=[info("a")], d=[info("a")])
    catalogue.on_list("d", [])
    assert lacking(catalogue, "d") == []
    catalogue.on_loss("d")
    catalogue.on_list("d", [])
    assert lacking(catalogue, "d") == []
    catalogue.on_list("d", [info("a")])
    catalogue.on_loss("d")
    catalogue.on_list("d-anew", [])
    assert lacking(catalogue, "d-anew") == ["a"]


def test_an_adapter_outlives_the_death_of_its_nodes() -> None:
    catalogue = with_nodes(p=[info("a")])
    catalogue.on_loss("p")
    assert catalogue.expects(Adapter("a", "1"))
    catalogue.on_list("p-anew", [])
    assert lacking(catalogue, "p-anew") == ["a"]


def test_who_was_away_during_an_unload_owes_it_and_teaches_nothing() -> None:
    catalogue = with_nodes(p=[info("a")], d=[info("a"), info("b")])
    catalogue.on_loss("d")
    entry = catalogue.begin_unload("a")
    catalogue.on_list("p", [])
    catalogue.unloaded(entry)
    catalogue.on_list("d", [info("a"), info("b")])
    assert catalogue.debts("d") == ["a"]
    assert digest(catalogue, "a") is None
    assert digest(catalogue, "b") == "1"
    catalogue.on_list("d", [info("b")])
    catalogue.settle_debt("d", "a")
    catalogue.on_list("d", [info("a"), info("b")])  # loaded there anew
    assert digest(catalogue, "a") == "1"


@pytest.mark.parametrize("content", ["1", "2"])
def test_a_debt_stands_whatever_was_loaded_since(content: str) -> None:
    """The order to unload may still lie there unread, and would take what was loaded since."""
    catalogue = with_nodes(p=[info("a")], d=[info("a")])
    catalogue.on_loss("d")
    catalogue.unloaded(catalogue.begin_unload("a"))
    catalogue.on_list("p", [])
    catalogue.loaded(catalogue.begin_load("a", "/a", pinned=False), content)
    catalogue.on_list("p", [info("a", content)])
    catalogue.on_list("d", [info("a")])
    assert catalogue.debts("d") == ["a"]
    assert lacking(catalogue, "d") == ["a"]
    catalogue.on_list("d", [])
    catalogue.settle_debt("d", "a")
    assert lacking(catalogue, "d") == ["a"], "who unloads what it owes has not dropped it by itself"


def test_a_load_that_failed_leaves_nothing_but_what_the_command_line_wants() -> None:
    catalogue = AdapterCatalogue()
    catalogue.want("a", "/wanted")
    for name in ("a", "b"):
        catalogue.give_up_load(catalogue.begin_load(name, "/x", pinned=False))
    assert [(e.name, e.path, e.state) for e in catalogue.entries()] == [
        ("a", "/wanted", AdapterState.WANTED)
    ]


def test_verbs_exclude_each_other_with_their_words() -> None:
    catalogue = with_nodes(p=[info("a")])

    def refused(call: str, name: str) -> tuple[int, str]:
        load = partial(catalogue.begin_load, path="/x", pinned=False)
        with pytest.raises(ApiError) as error:
            (load if call == "load" else catalogue.begin_unload)(name)
        return error.value.status, error.value.message

    assert refused("load", "a") == (400, "adapter 'a' is already loaded from '/a'")
    assert refused("unload", "b") == (404, "adapter 'b' was never loaded")
    catalogue.begin_load("b", "/b", pinned=False)
    assert refused("load", "b") == refused("unload", "b") == (409, "adapter 'b' is being loaded")
    entry = catalogue.begin_unload("a")
    assert refused("load", "a") == refused("unload", "a") == (409, "adapter 'a' is being unloaded")
    catalogue.suspend_unload(entry)
    assert not catalogue.serves(entry.adapter)
    assert refused("load", "a")[0] == 409
    assert catalogue.begin_unload("a") is entry


def test_an_unload_that_nobody_waits_for_ends_with_the_last_list() -> None:
    catalogue = with_nodes(p=[info("a")])
    catalogue.suspend_unload(catalogue.begin_unload("a"))
    catalogue.on_list("p", [])
    assert digest(catalogue, "a") is None


def test_what_is_remembered_of_lost_nodes_is_bounded() -> None:
    catalogue = AdapterCatalogue()
    for i in range(REMEMBERED + 50):
        catalogue.on_list(f"n{i}", [info("a")])
        catalogue.on_loss(f"n{i}")
    catalogue.unloaded(catalogue.begin_unload("a"))
    owing = [i for i in range(REMEMBERED + 50) if catalogue.debts(f"n{i}")]
    assert owing == list(range(50, REMEMBERED + 50))
