"""Which processes a cluster consists of, and that every child's flags are checked beforehand."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from common.config import DecodeConfig, PrefillConfig
from common.credentials import Secret
from deploy.cluster import ClusterPlan, default_threads, plan_cluster
from deploy.config import ClusterConfig
from deploy.errors import StartupError
from deploy.flags import parse_flags
from router.config import RouterConfig

MODEL = Path("/models/m")


def args_of(plan: ClusterPlan, name: str) -> list[str]:
    (child,) = (child for child in plan.children if child.name == name)
    return list(child.command[4:])


def prefill(plan: ClusterPlan, number: int) -> PrefillConfig:
    return parse_flags(PrefillConfig, "", args_of(plan, f"prefill-{number}"))


def decode(plan: ClusterPlan, number: int) -> DecodeConfig:
    return parse_flags(DecodeConfig, "", args_of(plan, f"decode-{number}"))


def router(plan: ClusterPlan) -> RouterConfig:
    return parse_flags(RouterConfig, "", args_of(plan, "router"))


def test_children_agree_on_where_to_meet_and_what_to_serve() -> None:
    plan = plan_cluster(ClusterConfig(model="org/name", prefill=2, decode=3, port=0), MODEL)
    names = ["router", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert [child.name for child in plan.children] == names
    assert [child.essential for child in plan.children] == [True] + [False] * 5
    assert plan.num_nodes == 5
    at = router(plan)
    assert at.node_port != 0
    assert plan.url == f"http://127.0.0.1:{at.port}"
    for config in (at, prefill(plan, 1), decode(plan, 2)):
        assert (config.model, config.served_model_name) == (str(MODEL), "name")
    for node in (prefill(plan, 0), decode(plan, 0)):
        assert node.router == (f"tcp://127.0.0.1:{at.node_port}",)
        assert node.port == 0
    assert decode(plan, 2).name == "decode-2"


def test_a_cluster_may_do_without_prefill_nodes() -> None:
    config = ClusterConfig(model="m", prefill=0, decode=2, port=0)
    plan = plan_cluster(config, MODEL)
    assert [child.name for child in plan.children] == ["router", "decode-0", "decode-1"]
    with pytest.raises(StartupError, match="without prefill nodes"):
        plan_cluster(replace(config, router_args="--no-decode-alone"), MODEL)


def test_every_child_drains_as_long_as_the_cluster() -> None:
    plan = plan_cluster(ClusterConfig(model="m", drain_s=7.0, port=0), MODEL)
    assert [c.drain_s for c in (router(plan), prefill(plan, 0), decode(plan, 0))] == [7.0] * 3


def test_shared_settings_reach_every_node() -> None:
    shared = {"dtype": "float32", "max_model_len": 64, "page_size": 8, "num_pages": 32}
    shared |= {"max_loras_per_batch": 3, "max_loaded_loras": 5, "max_lora_rank": 32}
    shared |= {"lora_drain_wait_s": 0.5, "device": "cuda:1", "attention": "triton"}
    shared |= {"transfer_staging": "on"}
    config = ClusterConfig(**shared, max_running_requests=4, chunk_size=128)  # type: ignore[arg-type]
    plan = plan_cluster(config, MODEL)
    for node in (prefill(plan, 0), decode(plan, 0)):
        assert {name: getattr(node, name) for name in shared} == shared
        assert (node.max_running_requests, node.chunk_size) == (4, 128)


def test_nodes_share_the_memory_that_one_gpu_may_give() -> None:
    plan = plan_cluster(ClusterConfig(model="m", prefill=1, decode=3, mem_fraction=0.8), MODEL)
    assert [prefill(plan, 0).mem_fraction, decode(plan, 2).mem_fraction] == [0.2, 0.2]
    own = "--device cuda:1 --mem-fraction 0.9"
    plan = plan_cluster(ClusterConfig(model="m", device="cuda:0", decode_args=own), MODEL)
    assert (prefill(plan, 0).device, prefill(plan, 0).mem_fraction) == ("cuda:0", 0.425)
    assert (decode(plan, 0).device, decode(plan, 0).mem_fraction) == ("cuda:1", 0.9)


def test_adapters_are_the_routers_to_load() -> None:
    plan = plan_cluster(parse_flags(ClusterConfig, "", ["--lora", "a=/x", "--lora=b=o/y"]), MODEL)
    assert router(plan).lora == ("a=/x", "b=o/y")
    with pytest.raises(StartupError, match=r"router: .*lora"):
        plan_cluster(ClusterConfig(lora=("no path",), port=0), MODEL)


def test_more_flags_of_a_role_come_last_and_win() -> None:
    config = ClusterConfig(
        prefill_args="--chunk-size 64 --ucx-tls tcp",
        decode_args="--reserve-pages 2 --router tcp://other:1",
        router_args="--max-n 3",
    )
    plan = plan_cluster(config, MODEL)
    assert (prefill(plan, 0).chunk_size, prefill(plan, 0).ucx_tls) == (64, "tcp")
    assert (decode(plan, 0).chunk_size, decode(plan, 0).reserve_pages) == (512, 2)
    assert decode(plan, 0).router[1:] == ("tcp://other:1",)
    assert router(plan).max_n == 3


def test_processors_are_placed_and_give_the_thread_count() -> None:
    config = ClusterConfig(prefill=2, decode=2, cpus_prefill="0;1-3", cpus_decode="4,6")
    plan = plan_cluster(config, MODEL)
    nodes = [prefill(plan, 0), prefill(plan, 1), decode(plan, 0), decode(plan, 1)]
    assert [node.cpus for node in nodes] == ["0", "1-3", "4,6", "4,6"]
    assert [node.threads for node in nodes] == [1, 3, 2, 2]


def test_ranks_share_the_processors_of_their_node() -> None:
    plan = plan_cluster(ClusterConfig(tp=2, cpus_prefill="0-5", cpus_decode="7"), MODEL)
    assert [prefill(plan, 0).tp, decode(plan, 0).tp] == [2, 2]
    assert [prefill(plan, 0).threads, decode(plan, 0).threads] == [3, 1]
    plan = plan_cluster(ClusterConfig(tp=2, decode_args="--tp 4"), MODEL)
    assert [prefill(plan, 0).tp, decode(plan, 0).tp] == [2, 4]
    expected = default_threads(len(os.sched_getaffinity(0)), 4)
    assert prefill(plan, 0).threads == expected


def test_without_placement_the_processors_are_shared_out() -> None:
    plan = plan_cluster(ClusterConfig(), MODEL)
    expected = default_threads(len(os.sched_getaffinity(0)), 2)
    assert [prefill(plan, 0).threads, decode(plan, 0).threads] == [expected] * 2


@pytest.mark.parametrize(
    ("processors", "nodes", "threads"), [(1, 2, 1), (2, 2, 1), (4, 2, 2), (8, 2, 3), (16, 4, 3)]
)
def test_default_threads(processors: int, nodes: int, threads: int) -> None:
    assert default_threads(processors, nodes) == threads


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ClusterConfig(prefill_args="--nonsense 1"), "prefill-0: .*--nonsense"),
        (ClusterConfig(decode_args="--page-size 0"), "decode-0: .*page_size must be positive"),
        (ClusterConfig(router_args="--max-n x"), "router: .*--max-n"),
        (ClusterConfig(host="192.0.2.1", port=0), "cannot listen on 192.0.2.1"),
    ],
)
def test_a_childs_wrong_flag_is_told_before_anything_starts(
    config: ClusterConfig, message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        plan_cluster(config, MODEL)


def secret_of(plan: ClusterPlan, name: str) -> str:
    (child,) = (child for child in plan.children if child.name == name)
    return dict(child.environment)["PDSERVE_SECRET"]


def test_children_share_a_secret_that_is_in_no_command_line_and_no_repr() -> None:
    plan, other = (plan_cluster(ClusterConfig(port=0), MODEL, {}) for _ in range(2))
    secret = secret_of(plan, "router")
    assert len(secret) >= 32
    assert {secret_of(plan, child.name) for child in plan.children} == {secret}
    assert secret_of(other, "router") != secret
    assert secret not in repr(plan)
    assert not any(secret in part for child in plan.children for part in child.command)


def test_a_given_secret_is_kept_and_only_the_router_gets_the_keys() -> None:
    environ = {"PDSERVE_SECRET": "sixteen or more letters", "PDSERVE_API_KEYS": "a" * 20 + ",b"}
    with pytest.raises(StartupError, match="API key in PDSERVE_API_KEYS must have at least 16"):
        plan_cluster(ClusterConfig(port=0), MODEL, environ)
    environ["PDSERVE_API_KEYS"] = "a" * 20
    plan = plan_cluster(ClusterConfig(port=0), MODEL, environ)
    assert secret_of(plan, "decode-0") == "sixteen or more letters"
    assert plan.key == Secret("a" * 20)
    for child in plan.children:
        assert ("PDSERVE_API_KEYS" in dict(child.environment)) is (child.name != "router")


def test_an_endpoint_for_other_machines_needs_keys(tmp_path: Path) -> None:
    config = ClusterConfig(host="0.0.0.0", port=0)
    with pytest.raises(StartupError, match=r"host: 0.0.0.0 .* needs API keys"):
        plan_cluster(config, MODEL, {})
    assert plan_cluster(config, MODEL, {"PDSERVE_API_KEYS": "k" * 16}).num_nodes == 2
    file = tmp_path / "keys"
    file.write_text("k" * 16)
    with_file = ClusterConfig(host="0.0.0.0", port=0, api_key_file=str(file))
    assert router(plan_cluster(with_file, MODEL, {})).api_key_file == str(file)


def test_an_open_host_is_announced_by_an_address_that_can_be_dialled() -> None:
    plan = plan_cluster(ClusterConfig(host="0.0.0.0", allow_insecure_bind=True), MODEL, {})
    assert plan.url == "http://127.0.0.1:8000"
    assert router(plan).host == "0.0.0.0"
    assert prefill(plan, 0).host == "127.0.0.1"
