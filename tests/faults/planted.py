"""The prefill node's command line with something planted in it, for stand-ins of that node."""

import sys
from collections.abc import Callable

from common.config import NodeConfig
from deploy import cli
from deploy.process import prepare


def run_prefill(plant: Callable[[], None]) -> int:
    """Run it; `plant` is called after what must come before torch and UCX are loaded."""

    def prepare_and_plant(config: NodeConfig) -> None:
        prepare(config)
        plant()

    setattr(cli, "prepare", prepare_and_plant)  # noqa: B010 - a function is replaced on purpose
    return cli.main(["prefill", *sys.argv[1:]])
