"""What clients call adapters, what the command line calls them, and their metrics' labels."""

import json

import pytest

from common.label_budget import OTHER
from common.messages import Adapter, AdapterInfo
from router.adapters import AdapterCatalogue
from router.config import RouterConfig, parse_adapters
from router.errors import ApiError
from router.metrics import RouterMetrics
from router.model_names import ModelNames
from router.request_log import end_line
from tests.unit.router.desk import Desk

ONE, TWO = Adapter("one", "c1"), Adapter("two", "c2")


def names() -> ModelNames:
    catalogue = AdapterCatalogue()
    infos = [
        AdapterInfo(name=name, digest=digest, path=path, rank=8)
        for name, digest, path in (
            ("one", "c1", "/one"), ("two", "c2", "/two"), ("two-again", "c2", "/two"),
            ("/one", "c3", "/three"),
        )
    ]  # fmt: skip
    catalogue.on_list("p", infos)
    catalogue.want("wanted", "/wanted")
    catalogue.begin_load("loading", "/loading", pinned=False)
    return ModelNames("base:8b", "/models/base", catalogue)


@pytest.mark.parametrize(
    ("model", "lora_path", "expected"),
    [
        (None, None, None),
        ("", "", None),
        ("base:8b", None, None),
        ("/models/base", None, None),
        ("base:8b:one", None, ONE),
        ("/models/base:one", None, ONE),
        ("one", None, ONE),
        ("one", "one", ONE),
        (None, "two", TWO),
        ("base:8b", "two", TWO),
        (None, "/one", Adapter("/one", "c3")),  # a name comes before a path
        ("two", ["two"], TWO),
        ("two", [None], TWO),
        ("base:8b", [None], None),
    ],
)
def test_the_adapter_of_a_request(
    model: str | None, lora_path: str | list[str | None] | None, expected: Adapter | None
) -> None:
    assert names().adapters_of(model, lora_path, 1) == [expected]


@pytest.mark.parametrize(
    ("model", "lora_path", "status", "words"),
    [
        ("gpt", None, 404, "does not exist"),
        ("base:8b:gpt", None, 404, "does not exist"),
        ("other:one", None, 404, "does not exist"),
        ("base:8b:", None, 404, "does not exist"),
        ("loading", None, 404, "does not exist"),
        (None, "nothing", 404, "not loaded"),
        ("wanted", None, 503, "no node has loaded"),
        (None, "/wanted", 503, "no node has loaded"),
        ("one", "two", 400, "lora_path another"),
        ("one", ["two"], 400, "lora_path another"),
        (None, ["one", "two"], 400, "2 given for 1"),
        (None, [], 400, "0 given for 1"),
        (None, "/two", 400, "give a name"),
    ],
)
def test_what_is_no_adapter_is_refused(
    model: str | None, lora_path: str | list[str | None] | None, status: int, words: str
) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        names().adapters_of(model, lora_path, 1)
    assert refused.value.status == status


def test_each_prompt_has_its_own() -> None:
    found = names().adapters_of(None, ["one", None, "two"], 3)
    assert found == [ONE, None, TWO]


def test_flags_of_adapters() -> None:
    assert parse_adapters(["a=/x", "b=org/name=1"]) == {"a": "/x", "b": "org/name=1"}
    for flags in (["a"], ["=x"], ["a="], ["a=x", "a=y"], ["a:b=x"], [" a=x"]):
        with pytest.raises(ValueError, match="lora"):
            RouterConfig(lora=tuple(flags))
    with pytest.raises(ValueError, match="own name"):
        RouterConfig(served_model_name="base", lora=("base=/x",))


def test_the_log_and_a_bounded_number_of_labels_name_the_adapter() -> None:
    metrics = RouterMetrics()
    desk = Desk("p1 d1")

    def end(name: str) -> None:
        job = desk.submit(adapter=Adapter(name, "c"))
        desk.dispatcher.cancel(job, desk.now)
        assert json.loads(end_line(job))["adapter"] == name
        metrics.on_end(job)

    for i in range(100):
        end(f"a{i}")
    text = metrics.text().decode()
    shown = [
        line for line in text.splitlines() if line.startswith("pdserve_router_lora_requests_t")
    ]
    assert 10 < len(shown) < 50
    (others,) = [line for line in shown if f'adapter="{OTHER}"' in line]
    assert float(others.split()[-1]) == 100 - (len(shown) - 1)
    metrics.keep_adapters(["a99"])
    end("a99")
    assert 'pdserve_router_lora_requests_total{adapter="a99"} 1.0' in metrics.text().decode()
    assert 'adapter="a0"' not in metrics.text().decode()


def test_metrics_without_adapters_have_no_labels_of_them() -> None:
    metrics = RouterMetrics()
    desk = Desk("p1 d1")
    job = desk.submit()
    desk.dispatcher.cancel(job, desk.now)
    metrics.on_end(job)
    assert json.loads(end_line(job))["adapter"] is None
    assert 'adapter="' not in metrics.text().decode()
