"""The project's structural rules, as functions from sources to violations.

Sources are a mapping of path (relative to the root, with slashes) to text, so that a test can plant
a violation without touching the tree. Each rule returns lines `path:line: what is wrong`.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePosixPath

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

TOO_LONG_WITH_REASON: Mapping[str, str] = {
    "common/messages.py": "every wire type in one file, so that the whole protocol is read at once",
}
"""`path` or `path:function` that may be longer, and why."""

PACKAGES = ("common", "transfer", "prefill_node", "decode_node", "router", "deploy")
FOLDERS = (*PACKAGES, "tests", "benchmarks")

ARROWS: Mapping[str, frozenset[str]] = {
    "common": frozenset({"common"}),
    "transfer": frozenset({"common", "transfer"}),
    "prefill_node": frozenset({"common", "transfer", "prefill_node"}),
    "decode_node": frozenset({"common", "transfer", "decode_node"}),
    "router": frozenset({"common", "router"}),
    "deploy": frozenset(PACKAGES),
}
"""What each package may import of the others."""

ROUTER_FORBIDDEN = (
    "common.engine", "common.kv_cache", "common.node_io", "common.scheduler", "common.event_loop",
    "common.plan", "torch",
)  # fmt: skip
"""The router deals in text and messages; what computes or moves KV is none of its business."""

ROUTER_ALLOWED = ("common.kv_cache.hashing",)
"""How pages are named: what nodes tell the router of their caches."""

TORCH_HOMES = ("common/engine/*", "common/kv_cache/storage.py")
NIXL_HOMES = ("transfer/nixl.py",)
TRITON_HOMES = ("common/engine/kernels/*",)
GRAMMAR_HOMES = ("common/grammar/*",)
MODE_HOMES = ("deploy/node.py",)

PURE = (
    "common/scheduler.py", "common/lifecycle.py", "common/request.py", "common/plan.py",
    "common/role.py", "common/lora/*.py", "common/grammar/desk.py",
    "common/ledger.py", "common/outbox.py", "common/slots.py", "common/stats.py",
    "common/tombstones.py", "common/kv_cache/page_pool.py", "common/kv_cache/manager.py",
    "common/kv_cache/prefix_cache.py", "common/kv_cache/hashing.py", "decode_node/prefill_side.py",
    "decode_node/local_prefill.py", "common/chunked_prefill.py", "router/local_prefill.py",
    "prefill_node/early.py",
    "*/scheduler.py", "*/admission.py", "*/peers.py", "*_node/request.py",
    "router/dispatcher.py", "router/intake.py", "router/placement.py", "router/load.py",
    "router/rates.py", "router/waiting.py", "router/replay.py", "router/attempts.py",
    "router/requests.py", "router/stranded.py", "router/policies.py", "router/nodes.py",
)  # fmt: skip
"""Decisions only: everything they know comes in as events and arguments."""
IMPURE_MODULES = (
    "torch", "zmq", "nixl", "aiohttp", "time", "asyncio", "threading", "socket", "datetime",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def package(self) -> str:
        return self.path.partition("/")[0]

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_free(self) -> bool:
        """Tests and benchmarks look at everything."""
        return self.package in ("tests", "benchmarks")

    @cached_property
    def imports(self) -> tuple[tuple[int, str], ...]:
        """(line, dotted name) of each import anywhere; `from a import b` gives `a.b`."""
        return tuple(self._imports())

    def _imports(self) -> Iterator[tuple[int, str]]:
        base = self.module.split(".")
        if not self.path.endswith("/__init__.py"):
            base = base[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                above = base[: len(base) - node.level + 1] if node.level else []
                prefix = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield node.lineno, f"{prefix}.{alias.name}".lstrip(".")


Sources = Mapping[str, Source]
Rule = Callable[[Sources], list[str]]


def read_sources(root: Path) -> dict[str, Source]:
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    names = {path.relative_to(root).as_posix(): path for path in paths}
    return {name: Source(name, path.read_text()) for name, path in names.items()}


def is_in(dotted: str, modules: tuple[str, ...]) -> bool:
    return any(dotted == module or dotted.startswith(module + ".") for module in modules)


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def reached_from(start: Source, sources: Sources) -> Iterator[tuple[Source, int, str]]:
    """Each import of `start` and of the project's modules it pulls in: (where, line, name)."""
    by_module = {source.module: source for source in sources.values()}
    seen, todo = {start.module}, [start]
    while todo:
        source = todo.pop()
        for line, name in source.imports:
            yield source, line, name
            for module in (name, name.rpartition(".")[0]):
                target = by_module.get(module)
                if target is not None and module not in seen and not target.is_free:
                    seen.add(module)
                    todo.append(target)


# ---------------------------------------------------------------- the rules


def wrong_arrows(sources: Sources) -> list[str]:
    found = []
    for source in sources.values():
        if source.is_free:
            continue
        allowed = ARROWS[source.package]
        if source.path.endswith("/__main__.py"):
            allowed |= {"deploy"}  # an entry point hands over to the composition root
        for line, name in source.imports:
            top = name.partition(".")[0]
            if top in FOLDERS and top not in allowed:
                found.append(f"{source.path}:{line}: {source.package} must not import {name}")
    return found


def impure_router(sources: Sources) -> list[str]:
    return [
        f"{where.path}:{line}: {source.path} reaches {name}, which the router must not"
        for source in sources.values()
        if source.package == "router" and not source.path.endswith("/__main__.py")
        for where, line, name in reached_from(source, sources)
        if is_in(name, ROUTER_FORBIDDEN) and not is_in(name, ROUTER_ALLOWED)
    ]


def stray_torch(sources: Sources) -> list[str]:
    return _stray(sources, "torch", TORCH_HOMES)


def stray_llguidance(sources: Sources) -> list[str]:
    return _stray(sources, "llguidance", GRAMMAR_HOMES)


def stray_nixl(sources: Sources) -> list[str]:
    return _stray(sources, "nixl", NIXL_HOMES)


def stray_triton(sources: Sources) -> list[str]:
    return _stray(sources, "triton", TRITON_HOMES)


def _stray(sources: Sources, module: str, homes: tuple[str, ...]) -> list[str]:
    return [
        f"{source.path}:{line}: {module} belongs in {', '.join(homes)} only"
        for source in sources.values()
        if not source.is_free and not matches(source.path, homes)
        for line, name in source.imports
        if is_in(name, (module,))
    ]


def impure_decisions(sources: Sources) -> list[str]:
    found = []
    for source in sources.values():
        if source.is_free or not matches(source.path, PURE):
            continue
        for where, line, name in reached_from(source, sources):
            if is_in(name, IMPURE_MODULES):
                found.append(f"{where.path}:{line}: {source.path} is pure but reaches {name}")
        for node in ast.walk(source.tree):
            match node:
                case ast.Call(func=ast.Name(id="print")):
                    found.append(f"{source.path}:{node.lineno}: a pure module prints nothing")
    return found


def modes_looked_at(sources: Sources) -> list[str]:
    """Comparing or matching `DisaggregationMode`, by member or by its string value."""
    found = []
    for source in sources.values():
        if source.is_free or matches(source.path, MODE_HOMES):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Compare | ast.match_case) and _names_a_mode(node):
                line = node.lineno if isinstance(node, ast.Compare) else node.pattern.lineno
                found.append(f"{source.path}:{line}: only {MODE_HOMES[0]} looks at the mode")
    return found


def _names_a_mode(node: ast.Compare | ast.match_case) -> bool:
    roots = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.pattern]
    return any(
        isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name)
        and part.value.id == "DisaggregationMode"
        for root in roots
        for part in ast.walk(root)
    )


def shapeless_names(sources: Sources) -> list[str]:
    return [
        f"{path}:1: a file is named after what it holds"
        for path in sources
        if PurePosixPath(path).stem in ("utils", "helpers", "util", "helper", "misc")
    ]


def too_long(sources: Sources) -> list[str]:
    found = []
    for source in sources.values():
        lines = source.text.count("\n")
        if lines > MAX_FILE_LINES and source.path not in TOO_LONG_WITH_REASON:
            found.append(f"{source.path}:1: {lines} lines, more than {MAX_FILE_LINES}")
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            name = f"{source.path}:{node.name}"
            if lines > MAX_FUNCTION_LINES and name not in TOO_LONG_WITH_REASON:
                found.append(
                    f"{source.path}:{node.lineno}: {node.name} has {lines} lines, "
                    f"more than {MAX_FUNCTION_LINES}"
                )
    return found


RULES: tuple[Rule, ...] = (
    wrong_arrows, impure_router, stray_torch, stray_nixl, stray_triton, stray_llguidance,
    impure_decisions, modes_looked_at, shapeless_names, too_long,
)  # fmt: skip
