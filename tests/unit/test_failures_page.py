"""`docs/failures.md` names a test for each scenario; each of them must exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "failures.md"
REFERENCE = re.compile(r"`((?:unit|integration|multinode|kernels)/[\w/]+\.py)::(test_\w+)`")


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_test_that_the_page_names_exists() -> None:
    references = REFERENCE.findall(PAGE.read_text())
    assert len(references) > 60
    missing = [
        f"{path}::{name}"
        for path, name in references
        if not (TESTS / path).is_file() or name not in functions_of(TESTS / path)
    ]
    assert missing == []


def test_every_scenario_names_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    scenarios = [row for row in rows if not row.startswith(("| Scenario ", "| Root "))]
    assert len(scenarios) > 45
    assert [row[:60] for row in scenarios if not REFERENCE.search(row)] == []
