"""A prefill node whose forward passes last seconds longer, as on a long chunk or a first compile.

Run as `python -m tests.faults.slow_prefill` in place of `prefill_node`; `STEP_S` names how long.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.faults.planted import run_prefill

STEP_S = "PDSERVE_TEST_STEP_S"


def plant(seconds: float) -> None:
    """Let the engine's thread stand still in every forward pass from now on."""
    from common.engine.runner import ModelRunner

    launch: Callable[..., Any] = ModelRunner.launch

    def planted(*args: Any) -> Any:
        time.sleep(seconds)
        return launch(*args)

    setattr(ModelRunner, "launch", planted)  # noqa: B010 - a method is replaced on purpose


if __name__ == "__main__":
    sys.exit(run_prefill(lambda: plant(float(os.environ[STEP_S]))))
