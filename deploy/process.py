"""What a process does to itself at start: die with its supervisor, stay on its processors.

All of it comes before torch and NIXL are imported, which read their surroundings once.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from common.config import NodeConfig
from deploy.config import parse_cpus
from deploy.errors import StartupError

ROOT = Path(__file__).resolve().parents[1]
_SUPERVISOR = "PDSERVE_SUPERVISOR"
_PR_SET_PDEATHSIG = 1


def supervised_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` for a child that should call `die_with_supervisor`."""
    return {**base, _SUPERVISOR: str(os.getpid())}


def own_module(module: str, *args: str) -> tuple[str, ...]:
    """The command that runs a module of ours; needs `import_path` for PYTHONPATH."""
    # -P and the explicit path: a folder named `router` where the user stands is not ours.
    return (sys.executable, "-P", "-m", module, *args)


def import_path(environ: Mapping[str, str]) -> str:
    """PYTHONPATH for `own_module`."""
    return os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))


def die_with_supervisor() -> None:
    """Have the kernel kill this process when its supervisor ends, even by `kill -9` (Linux).

    Does nothing for a process that no supervisor started.
    """
    supervisor = os.environ.pop(_SUPERVISOR, None)
    if supervisor is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(supervisor):
        # It ended before the kernel knew of our wish.
        sys.exit("the supervisor is gone")


def prepare(config: NodeConfig) -> None:
    """Processors and environment of a node. Raises StartupError."""
    pin_to(config.cpus)
    if config.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
    if config.ucx_tls is not None:
        os.environ["UCX_TLS"] = config.ucx_tls
    os.environ.setdefault("UCX_TCP_USER_TIMEOUT", f"{config.tcp_timeout_s:g}s")


def pin_to(cpus: str | None) -> None:
    """Keep this process, and threads it starts from now on, on the processors of `0,2-3`.

    Raises:
        StartupError: not a processor set, or processors that this machine does not give us.
    """
    if cpus is None:
        return
    try:
        wanted = parse_cpus(cpus)
    except ValueError as error:
        raise StartupError(f"cpus: {error}") from error
    available = os.sched_getaffinity(0)
    if not wanted <= available:
        raise StartupError(f"cpus: {cpus} is not among {sorted(available)}")
    os.sched_setaffinity(0, wanted)
