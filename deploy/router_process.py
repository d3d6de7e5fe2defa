"""The router as a process: model folder, logs, signals; what it does is `router.app.serve`."""

import asyncio
import gc
import os
import signal

import uvloop

from common.gatekeeper import NoCurve
from common.logs import setup_logging
from deploy.access import router_access
from deploy.default_model import resolve_model
from deploy.errors import StartupError
from router.access import Access
from router.app import serve
from router.config import RouterConfig
from router.tokens import UnusableModelFolder

ENDING = (signal.SIGTERM, signal.SIGINT)
NEW_OBJECTS = 20_000
"""Containers that are made before garbage is looked for among the youngest: some dozen requests'
worth. Hardly any of it is in cycles."""


def run_router(config: RouterConfig) -> int:
    """Serve until SIGTERM, SIGINT or `POST /drain`, then drain and return 0. A second signal ends
    what is unfinished with an error, at once.

    Raises:
        StartupError: no usable tokenizer in the model's folder, a port that is taken, a secret
            that cannot be used, or none where one is needed.
    """
    setup_logging("router", config.log_level.upper())
    # Texts come one at a time: handing each to a pool of threads and back only takes longer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    access = router_access(config, os.environ)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signalled(config, access))
    except UnusableModelFolder as error:
        raise StartupError(f"model: {error}") from error
    except (OSError, NoCurve) as error:
        raise StartupError(str(error)) from error
    except KeyboardInterrupt:
        pass  # before the handlers were there
    return 0


async def _until_signalled(config: RouterConfig, access: Access) -> None:
    folder = await asyncio.to_thread(resolve_model, config.model)
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    serving = asyncio.create_task(
        serve(config, folder, access=access, ready=lambda _: _tune_collector(), end=end)
    )

    def drain() -> None:
        end.set()
        for number in ENDING:
            loop.add_signal_handler(number, serving.cancel)

    for number in ENDING:
        loop.add_signal_handler(number, drain)
    await asyncio.wait({serving})
    if not serving.cancelled():
        serving.result()


def _tune_collector() -> None:
    """What was made until now stays: garbage is not looked for in it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
