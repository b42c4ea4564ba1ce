from testing import sizes


def test_rooms_stay_below_the_ceiling() -> None:
    assert not sizes.excess()
