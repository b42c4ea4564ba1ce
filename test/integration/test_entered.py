from testing.entered import MOST
from testing.subprocesses import run_python


def test_requests_enter_few_files() -> None:
    counts, said = {}, run_python("-m", "testing.entered")
    for line in said.splitlines():
        name, _, rest = line.partition(": ")
        if name in MOST:
            counts[name] = int(rest.split()[0])
    assert counts.keys() == MOST.keys()
    assert {name: count for name, count in counts.items() if count > MOST[name]} == {}, said
