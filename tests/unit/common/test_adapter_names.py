import pytest

from common.adapter_names import MAX_NAME, MAX_PATH, name_problem, path_problem


@pytest.mark.parametrize("name", ["a", "org/adapter-1", "zwölf", "two words", "n" * MAX_NAME])
def test_names_that_may_be(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "1 to 256"),
        ("n" * (MAX_NAME + 1), "not 257"),
        ("base:a", "ambiguous"),
        (" a", "space"),
        ("a ", "space"),
        ("a\nb", "printable"),
        ("a\0", "printable"),
        ("\ud800", "printable"),
    ],
)
def test_names_that_may_not_be_and_why(name: str, why: str) -> None:
    problem = name_problem(name)
    assert problem is not None
    assert why in problem
    assert problem.isprintable()


def test_paths_are_bounded_and_printable() -> None:
    assert path_problem("/models/with space/a:b") is None
    assert path_problem("p" * MAX_PATH) is None
    for path in ("", "p" * (MAX_PATH + 1), "a\0b", "a\nb"):
        assert path_problem(path) is not None
