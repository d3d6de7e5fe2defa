"""The command line: `pdserve prefill|decode|router|cluster|chat`.

Each command imports what it needs when it runs, so `--help` answers without loading torch and the
router never does.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.config import DecodeConfig, PrefillConfig
from common.modes import DisaggregationMode
from deploy.errors import StartupError
from deploy.flags import parse_flags
from deploy.process import die_with_supervisor, prepare


def _prefill(args: Sequence[str]) -> int:
    config = parse_flags(PrefillConfig, "pdserve prefill", args)
    prepare(config)
    from deploy.node import run_node

    return run_node(DisaggregationMode.PREFILL, config)


def _decode(args: Sequence[str]) -> int:
    config = parse_flags(DecodeConfig, "pdserve decode", args)
    prepare(config)
    from deploy.node import run_node

    return run_node(DisaggregationMode.DECODE, config)


def _router(args: Sequence[str]) -> int:
    from router.config import RouterConfig

    config = parse_flags(RouterConfig, "pdserve router", args)
    from deploy.router_process import run_router

    return run_router(config)


def _cluster(args: Sequence[str]) -> int:
    from deploy.config import ClusterConfig

    config = parse_flags(ClusterConfig, "pdserve cluster", args)
    from deploy.cluster import run_cluster

    return run_cluster(config)


def _chat(args: Sequence[str]) -> int:
    from deploy.config import ChatConfig

    config = parse_flags(ChatConfig, "pdserve chat", args)
    from deploy.chat import run_chat

    return run_chat(config)


def _node_key(args: Sequence[str]) -> int:
    from deploy.config import NodeKeyConfig

    config = parse_flags(NodeKeyConfig, "pdserve node-key", args)
    from deploy.access import node_key

    print(node_key(config.secret_file, os.environ).reveal())
    return 0


@dataclass(frozen=True, slots=True)
class Command:
    help: str
    run: Callable[[Sequence[str]], int]


COMMANDS: Mapping[str, Command] = {
    "cluster": Command("router, prefill and decode nodes on this machine", _cluster),
    "chat": Command("talk to an endpoint from the terminal", _chat),
    "router": Command("the HTTP endpoint that nodes join", _router),
    "prefill": Command("a node that turns prompts into KV cache", _prefill),
    "decode": Command("a node that turns KV cache into tokens", _decode),
    "node-key": Command("print the bearer token of the nodes' own HTTP", _node_key),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. 2 means that the user must change something."""
    die_with_supervisor()
    args = list(sys.argv[1:] if argv is None else argv)
    name = args[0] if args else ""
    if name in ("", "-h", "--help"):
        print(_usage())
        return 0 if name else 2
    command = COMMANDS.get(name)
    if command is None:
        print(f"pdserve: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return command.run(args[1:])
    except StartupError as error:
        print(f"pdserve {name}: {error}", file=sys.stderr)
        return 2


def _usage() -> str:
    lines = [
        "usage: pdserve COMMAND [FLAGS]    (pdserve COMMAND --help lists its flags)",
        "",
        "Serve large language models with prefill and decode on separate nodes.",
        "",
        *(f"  {name:<9}{command.help}" for name, command in COMMANDS.items()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
