"""A pytest plugin: cases that show in another size, type or stage what others show.

A plain run leaves them out, and says how many at its end; with TEST_ALL, as `make test-all` sets
it, they run. `@pytest.mark.repeats` marks such a test, and `again` such a case of a test.
`@pytest.mark.release` marks a test of what only a release needs: a benchmark's script, a long run.
`examples` counts those of a property. Of the product of a test's parameters,
`@pytest.mark.diagonal` keeps few cases that have each value of each parameter, and
`@pytest.mark.pairs` few that have each pair of values of two parameters.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

RUNS_ALL = "TEST_ALL" in os.environ
_COUNT = pytest.StashKey[int]()


LEFT_OUT = {
    "repeats": "shows again what another case shows",
    "release": "shows what only a release needs",
}
# By mark: the number of parameters whose values are kept together.
PRODUCTS = {"diagonal": 1, "pairs": 2}


def again(*values: Any) -> Any:
    """Mark a case of a parametrised test. values: of its parameters."""
    return pytest.param(*values, marks=pytest.mark.repeats)


def examples(count: int) -> int:
    """Return how many examples a property takes: a third of `count` in a plain run."""
    return count if RUNS_ALL else -(-count // 3)


def covering(cases: Sequence[Mapping[str, Hashable]], together: int) -> set[int]:
    """Return the places of few cases that have, between them, what all of them have.

    cases: values by the names of parameters. together: number of parameters whose values must be
    met together in a case.
    """
    has = [set(combinations(sorted(case.items()), together)) for case in cases]
    missing = set().union(*has)
    used: Counter[Any] = Counter()
    kept: set[int] = set()

    def gain(place: int) -> tuple[int, int]:  # and values that were used less
        return len(missing & has[place]), -sum(used[pair] for pair in cases[place].items())

    while missing:
        best = max(range(len(cases)), key=gain)
        kept.add(best)
        missing -= has[best]
        used.update(cases[best].items())
    return kept


def left_out(config: pytest.Config) -> int:
    """Return how many cases a run has left out."""
    return config.stash.get(_COUNT, 0)


def pytest_configure(config: pytest.Config) -> None:
    """Name the marks."""
    for mark, shows in LEFT_OUT.items():
        config.addinivalue_line("markers", f"{mark}: {shows}")
    config.addinivalue_line("markers", "diagonal: of a product, cases with each value are enough")
    config.addinivalue_line("markers", "pairs: of a product, cases with each pair are enough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what shows something again, or what a release alone needs."""
    if RUNS_ALL:
        return
    out = {item for item in items if any(map(item.get_closest_marker, LEFT_OUT))}
    products: dict[tuple[Any, str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        for mark, together in PRODUCTS.items():
            if isinstance(item, pytest.Function) and item.get_closest_marker(mark):
                products[item.parent, item.originalname, together].append(item)
    for (*_, together), cases in products.items():
        # All cases of a product have the same objects.
        ids = [{name: id(value) for name, value in c.callspec.params.items()} for c in cases]
        kept = covering(ids, together)
        out |= {case for place, case in enumerate(cases) if place not in kept}
    config.hook.pytest_deselected(items=list(out))
    items[:] = [item for item in items if item not in out]
    config.stash[_COUNT] = len(out)
    worker: dict[str, int] | None = getattr(config, "workeroutput", None)
    if worker is not None:  # of pytest-xdist, whose other process prints the summary
        worker["repeats"] = len(out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the count of a process of pytest-xdist, all of which collect the same."""
    node.config.stash[_COUNT] = getattr(node, "workeroutput", {}).get("repeats", 0)
