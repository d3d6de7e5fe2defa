"""What a real cluster shows to Prometheus, on both roles."""

import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.cluster_fixture import cluster
from tests.tiny_models import make_tiny_model

PROMPT = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
STAGES = {
    "prefill": {"bootstrap", "queue", "prefill", "transfer"},
    "decode": {"queue", "transfer", "waiting", "inter_token"},
}


def samples(url: str) -> list[Sample]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


def observed(url: str) -> dict[str, float]:
    """Stage -> how many samples the node has taken."""
    return {
        sample.labels["stage"]: sample.value
        for sample in samples(url)
        if sample.name == "pdserve_stage_seconds_count"
    }


def bytes_sent(url: str) -> float:
    (sent,) = (s.value for s in samples(url) if s.name == "pdserve_transfer_bytes_total")
    return sent


def test_every_role_counts_what_it_did(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    make_tiny_model("llama", folder)
    with cluster(folder) as running:
        before = {node.role: observed(node.url) for node in running.nodes()}
        for _ in range(3):
            running.post("/v1/completions", {"model": "tiny", **PROMPT})
        running.wait_until_idle()
        for node in running.nodes():
            after, earlier = observed(node.url), before[node.role]
            moved = {s for s in after if after[s] - earlier.get(s, 0) >= 3}
            assert moved >= STAGES[node.role], (node.role, after)
            assert (bytes_sent(node.url) > 0) is (node.role == "prefill")
