"""Endpoints under load, driven by aiperf: TTFT, TPOT and output tokens/s at several concurrencies.

    python -m benchmarks.serve --aiperf AIPERF --tokenizer FOLDER \\
        --endpoint pdserve=http://127.0.0.1:8000 [--endpoint other=http://127.0.0.1:8100=MODEL]

Several endpoints are measured in turn, A B A B, so that a drift of the machine hits all alike.
aiperf (PyPI) comes from an environment of its own; see README.md beside this file. The figures of
all rounds of an endpoint are pooled; each row shows medians and, in brackets, the spread.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Endpoint:
    name: str
    url: str
    model: str

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """`name=url` or `name=url=model`."""
        name, url, model = (*text.split("="), DEFAULT_MODEL)[:3]
        return cls(name, url, model)


@dataclass(slots=True)
class Figures:
    """Of one endpoint at one concurrency: per request in ms, per run in tokens/s."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)

    def add(self, folder: Path) -> None:
        """Take in what one aiperf run left behind."""
        for line in (folder / "profile_export.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["metadata"]["benchmark_phase"] == "warmup":
                continue
            metrics = record["metrics"]
            self.ttft_ms.append(metrics["time_to_first_token"]["value"])
            self.tpot_ms.append(metrics["inter_token_latency"]["value"])
        summary = json.loads((folder / "profile_export_aiperf.json").read_text())
        self.tokens_per_s.append(summary["output_token_throughput"]["avg"])

    def row(self) -> str:
        return "".join(_cell(v) for v in (self.ttft_ms, self.tpot_ms, self.tokens_per_s))


def _cell(values: list[float]) -> str:
    spread = f"({min(values):.0f}-{max(values):.0f})"
    return f"{statistics.median(values):9.1f} {spread:<13}"


def profile(options: argparse.Namespace, endpoint: Endpoint, concurrency: int) -> Path:
    """One aiperf run; the folder with its exports. Raises SystemExit with aiperf's own words."""
    folder = Path(tempfile.mkdtemp(prefix="aiperf-"))
    arguments = {
        "model": endpoint.model,
        "url": endpoint.url,
        "endpoint-type": "completions",
        "tokenizer": options.tokenizer,
        "isl": options.input,
        "isl-stddev": 0,
        "osl": options.output,
        "osl-stddev": 0,
        "extra-inputs": "ignore_eos:true",
        "concurrency": concurrency,
        "request-count": options.requests * concurrency,
        "warmup-request-count": concurrency,
        "ui-type": "none",
        "artifact-dir": folder,
    }
    command = [options.aiperf, "profile", "--streaming"]
    for name, value in arguments.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"aiperf failed against {endpoint.url}:\n{done.stdout[-4000:]}")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--aiperf", default="aiperf", help="the aiperf executable")
    parser.add_argument("--tokenizer", required=True, help="absolute path of the model's folder")
    parser.add_argument("--endpoint", action="append", required=True, type=Endpoint.parse)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input", type=int, default=256, help="prompt tokens")
    parser.add_argument("--output", type=int, default=64, help="output tokens")
    parser.add_argument("--requests", type=int, default=4, help="per stream and round")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    figures: dict[tuple[int, str], Figures] = defaultdict(Figures)
    for _ in range(options.rounds):
        for concurrency in options.concurrency:
            for endpoint in options.endpoint:
                folder = profile(options, endpoint, concurrency)
                figures[concurrency, endpoint.name].add(folder)
    columns = "".join(f"{title:>9} {'':13}" for title in ("TTFT ms", "TPOT ms", "tokens/s"))
    print(f"{'streams':>7}  {'endpoint':<14}{columns}")
    for (concurrency, name), figure in sorted(figures.items()):
        print(f"{concurrency:7}  {name:<14}{figure.row()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
