from common.label_budget import OTHER, LabelBudget


def test_the_first_names_have_their_own_label_and_keep_it() -> None:
    budget = LabelBudget(places=2)
    assert [budget.label(name) for name in ("a", "b", "c", "a", "c")] == [
        "a",
        "b",
        OTHER,
        "a",
        OTHER,
    ]


def test_a_name_that_is_gone_frees_its_place() -> None:
    budget = LabelBudget(places=2)
    for name in ("a", "b", "c"):
        budget.label(name)
    budget.keep(["b", "c"])
    assert [budget.label(name) for name in ("c", "b", "a")] == ["c", "b", OTHER]
