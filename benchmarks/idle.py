"""What a cluster costs while nobody asks it anything, in percent of one core.

python -m benchmarks.idle [--url http://127.0.0.1:8000] [--seconds 20]
"""

import argparse
import json
import time
import urllib.request

import psutil


def cpu_seconds(pids: list[int]) -> dict[int, float]:
    """User and system time that each process has used so far."""
    times = {pid: psutil.Process(pid).cpu_times() for pid in pids}
    return {pid: used.user + used.system for pid, used in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with urllib.request.urlopen(options.url + "/get_server_info") as response:
        info = json.loads(response.read())
    names = {info["pid"]: "router"} | {node["pid"]: node["name"] for node in info["nodes"]}
    before = cpu_seconds(list(names))
    time.sleep(options.seconds)
    after = cpu_seconds(list(names))
    total = 0.0
    for pid, name in names.items():
        percent = 100 * (after[pid] - before[pid]) / options.seconds
        total += percent
        print(f"{name:12}{percent:7.2f} %")
    print(f"{'all':12}{total:7.2f} %")


if __name__ == "__main__":
    main()
