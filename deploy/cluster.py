"""`pdserve cluster`: a router, prefill nodes and decode nodes on this machine, as one command.

model folder ──▶ children ──▶ all joined, a token came back ──▶ READY ──▶ until Ctrl-C
"""

import asyncio
import os
import shlex
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config import DecodeConfig, PrefillConfig
from common.credentials import Secret
from deploy.access import (
    ADMIN_KEYS_VARIABLE,
    API_KEYS_VARIABLE,
    SECRET_VARIABLE,
    client_keys,
    cluster_secret,
    random_secret,
    router_access,
)
from deploy.config import ClusterConfig, cpu_sets, parse_cpus
from deploy.default_model import resolve_model
from deploy.endpoint import Endpoint, EndpointError
from deploy.errors import StartupError
from deploy.flags import parse_flags
from deploy.process import import_path, own_module
from deploy.supervisor import ChildDied, ChildSpec, Supervisor, say
from router.config import RouterConfig

LOOPBACK = "127.0.0.1"
POLL_S = 0.1
ANSWER_TOKENS = 64

_SHARED = (
    "dtype", "device", "attention", "max_model_len", "page_size", "num_pages",
    "max_running_requests", "chunk_size", "max_loras_per_batch", "max_loaded_loras",
    "max_lora_rank", "lora_drain_wait_s", "tp", "transfer_staging",
)  # fmt: skip
"""Fields of the cluster that every node gets as they are."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Which processes make the cluster, and where it will answer."""

    children: tuple[ChildSpec, ...]
    url: str
    num_nodes: int
    key: Secret | None = None
    """What the router wants to see of its clients, if anything."""


def plan_cluster(
    config: ClusterConfig, model: Path, environ: Mapping[str, str] = os.environ
) -> ClusterPlan:
    """The children's command lines, checked as they will check them.

    Their links are always encrypted: a secret is made for them if none was given.

    Raises:
        StartupError: a flag for a child is wrong, or a secret cannot be used.
    """
    secret = cluster_secret(config.secret_file, environ) or random_secret()
    port = _bindable_port(config.host, config.port)
    node_port = _bindable_port(LOOPBACK, 0)
    name = config.served_model_name or Path(config.model).name
    common = ["--model", str(model), "--served-model-name", name, "--drain-s", str(config.drain_s)]
    adapters = [part for adapter in config.lora for part in ("--lora", adapter)]
    router = [
        *common, "--host", config.host, "--port", str(port), "--node-host", LOOPBACK,
        "--node-port", str(node_port), *_access_flags(config), *adapters,
        *shlex.split(config.router_args),
    ]  # fmt: skip
    children = [_child("router", "router", RouterConfig, router, secret)]
    settings = parse_flags(RouterConfig, "router", router)
    if not config.prefill and not settings.decode_alone:
        raise StartupError("a cluster without prefill nodes needs a router with --decode-alone")
    router_access(settings, {**environ, SECRET_VARIABLE: secret.reveal()})
    shared = common + [
        part
        for field in _SHARED
        if (value := getattr(config, field)) is not None
        for part in (f"--{field.replace('_', '-')}", str(value))
    ]
    shared += ["--router", f"tcp://{LOOPBACK}:{node_port}"]
    shared += ["--mem-fraction", f"{config.mem_fraction / (config.prefill + config.decode):.4g}"]
    ranks = config.tp * (config.prefill + config.decode)
    threads = default_threads(len(os.sched_getaffinity(0)), ranks)
    for number in range(config.prefill):
        placed = _placement(cpu_sets(config.cpus_prefill), number, threads, config.tp)
        args = ["--name", f"prefill-{number}", *shared, *placed, *shlex.split(config.prefill_args)]
        children.append(_child(f"prefill-{number}", "prefill_node", PrefillConfig, args, secret))
    for number in range(config.decode):
        placed = _placement(cpu_sets(config.cpus_decode), number, threads, config.tp)
        args = ["--name", f"decode-{number}", *shared, *placed, *shlex.split(config.decode_args)]
        children.append(_child(f"decode-{number}", "decode_node", DecodeConfig, args, secret))
    host = LOOPBACK if config.host in ("0.0.0.0", "::", "") else config.host
    key = next(iter(client_keys(settings.api_key_file, environ)), None)
    num_nodes = config.prefill + config.decode
    return ClusterPlan(tuple(children), f"http://{host}:{port}", num_nodes, key)


def _access_flags(config: ClusterConfig) -> list[str]:
    files = {"--api-key-file": config.api_key_file, "--admin-key-file": config.admin_key_file}
    flags = [part for flag, path in files.items() if path is not None for part in (flag, path)]
    return [*flags, "--allow-insecure-bind"] if config.allow_insecure_bind else flags


def default_threads(processors: int, ranks: int) -> int:
    """Torch threads of each rank of a node: an equal share, one processor left to the router where
    it can be."""
    spare = 1 if processors >= 2 * ranks + 1 else 0
    return max(1, (processors - spare) // ranks)


def _placement(sets: Sequence[str], number: int, threads: int, tp: int) -> list[str]:
    if not sets:
        return ["--threads", str(threads)]
    cpus = sets[number] if len(sets) > 1 else sets[0]
    return ["--cpus", cpus, "--threads", str(max(1, len(parse_cpus(cpus)) // tp))]


def _child(name: str, module: str, settings: type, args: list[str], secret: Secret) -> ChildSpec:
    try:
        parse_flags(settings, name, args)
    except StartupError as error:
        raise StartupError(f"{name}: {error}") from None
    is_router = module == "router"
    # The environment and not the command line, which every user of the machine can list. Only the
    # router has to know its clients' keys.
    others = () if is_router else ((API_KEYS_VARIABLE, ""), (ADMIN_KEYS_VARIABLE, ""))
    return ChildSpec(
        name=name,
        command=own_module(module, *args),
        environment=(
            ("PYTHONPATH", import_path(os.environ)),
            ("PYTHONUNBUFFERED", "1"),
            ("TOKENIZERS_PARALLELISM", "false"),
            (SECRET_VARIABLE, secret.reveal()),
            *others,
        ),
        essential=is_router,
    )


def _bindable_port(host: str, port: int) -> int:
    """`port`, or a free one for 0; the child that is told it binds it a moment later."""
    try:
        with socket.create_server((host, port)) as server:
            bound: int = server.getsockname()[1]
            return bound
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from error


# ---------------------------------------------------------------- running it


def run_cluster(config: ClusterConfig) -> int:
    """Serve until asked to end; the exit code, 1 if the cluster could not start or go on."""
    try:
        plan = plan_cluster(config, resolve_model(config.model))
        return asyncio.run(_serve(config, plan))
    except KeyboardInterrupt:
        return 130  # while the model was being fetched; the children are not there yet


async def _serve(config: ClusterConfig, plan: ClusterPlan) -> int:
    patience_s = config.drain_s + config.stop_timeout_s
    supervisor = Supervisor(plan.children, restart=config.restart, stop_timeout_s=patience_s)
    asked_to_end = asyncio.Event()
    _on_signals(asked_to_end, supervisor)
    supervisor.start()
    ending = asyncio.create_task(asked_to_end.wait())
    failing = asyncio.create_task(supervisor.failure())
    serving = asyncio.create_task(_announce(config, plan, supervisor))
    try:
        await asyncio.wait({ending, failing, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not ending.done():
            serving.result()
            await asyncio.wait({ending, failing}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            failing.result()
        return 0
    except (ChildDied, StartupError, EndpointError) as error:
        say(str(error))
        return 1
    finally:
        for task in (ending, failing, serving):
            task.cancel()
        await asyncio.gather(ending, failing, serving, return_exceptions=True)
        await supervisor.stop()


def _on_signals(asked_to_end: asyncio.Event, supervisor: Supervisor) -> None:
    """The first signal drains the cluster, a second one ends it at once."""

    def end() -> None:
        if asked_to_end.is_set():
            supervisor.kill()
        else:
            say("draining; a second signal ends it at once")
        asked_to_end.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, end)


async def _announce(config: ClusterConfig, plan: ClusterPlan, supervisor: Supervisor) -> None:
    """Wait until all nodes have joined and a token came back; say so once, and ask if told to."""
    async with Endpoint(plan.url, plan.key) as endpoint:
        until = time.monotonic() + config.start_timeout_s
        while not await _serves(endpoint, plan, supervisor):
            if time.monotonic() > until:
                raise StartupError(f"no request could be served in {config.start_timeout_s:g} s")
            await asyncio.sleep(POLL_S)
        supervisor.establish()
        print(f"READY {plan.url}", flush=True)
        if config.ask is None:
            return
        messages = [{"role": "user", "content": config.ask}]
        model = await endpoint.first_model()
        pieces = endpoint.chat(model, messages, max_tokens=ANSWER_TOKENS, temperature=0.0)
        # Whole lines: the children's log goes to the same terminal.
        answer = "".join([piece async for piece in pieces])
        print(f"> {config.ask}\n{answer}", flush=True)


async def _serves(endpoint: Endpoint, plan: ClusterPlan, supervisor: Supervisor) -> bool:
    """Whether all of our own nodes have joined whoever answers at our URL, and a token came back.

    Their process ids tell our router from another one that took the port a moment before.
    """
    joined = {node["pid"] for node in await endpoint.nodes()}
    ours = supervisor.pids() & joined
    return len(ours) == plan.num_nodes and await endpoint.serves()
