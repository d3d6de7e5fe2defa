"""The router as a process: model folder, logs, signals; what it does is `router.app.serve`."""

import asyncio
import signal

from common.logs import setup_logging
from deploy.default_model import resolve_model
from deploy.errors import StartupError
from router.app import serve
from router.config import RouterConfig
from router.tokens import UnusableModelFolder


def run_router(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT, then return 0.

    Raises:
        StartupError: no usable tokenizer in the model's folder, or a port that is taken.
    """
    setup_logging("router", config.log_level.upper())
    try:
        asyncio.run(_until_signalled(config))
    except UnusableModelFolder as error:
        raise StartupError(f"model: {error}") from error
    except OSError as error:
        raise StartupError(str(error)) from error
    except KeyboardInterrupt:
        pass  # before the handlers were there
    return 0


async def _until_signalled(config: RouterConfig) -> None:
    folder = await asyncio.to_thread(resolve_model, config.model)
    serving = asyncio.create_task(serve(config, folder))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    await asyncio.wait({serving})
    if not serving.cancelled():
        serving.result()
