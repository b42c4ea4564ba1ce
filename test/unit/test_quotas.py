"""Quotas: what all may have together, what one owner may have, and that all of it comes back."""

import threading

import pytest

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.serving.edge import quotas
from qwen3_omni_neuron.serving.edge.quotas import Account, Quota
from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.settings import ServerSettings


def quota(most: int = 100, share: float = 0.5) -> Quota:
    return Quota("bytes", most, share, "too_many_bytes")


def refusal(size: int) -> ApiError:
    return ApiError(413, f"{size} bytes", "request_too_large")


def test_an_owner_has_its_share_and_leaves_the_rest_to_others() -> None:
    held = quota()
    held.take("one", 50)
    with pytest.raises(ApiError, match="has 50 bytes, this needs 1; the limit is 50") as refused:
        held.take("one")
    assert (refused.value.status, refused.value.code) == (429, "too_many_bytes")
    assert refused.value.retry_after_s
    held.take("two", 50)
    with pytest.raises(ApiError, match="together have 100 bytes") as refused:
        held.take("three")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    assert held.taken == 100  # a refusal takes nothing
    held.give_back("one", 50)
    held.take("three", 50)


def test_an_owners_share_is_at_least_one_place() -> None:
    sessions = Quota("sessions", 1, 0.5, "too_many_sessions")
    with sessions.place("one"), pytest.raises(ApiError):
        sessions.place("one")
    assert sessions.taken == 0


def test_an_account_is_bounded_by_itself_and_by_the_quota() -> None:
    held = quota(share=1.0)
    account, other = Account(held, "one", 60, refusal), Account(held, "two", 60, refusal)
    account.hold(60)
    with pytest.raises(ApiError, match="61 bytes"):
        account.hold(1)
    with pytest.raises(ApiError, match="together have 60"):
        other.hold(41)
    other.add(41)  # what is there already is counted, and not refused
    assert held.taken == 101
    account.release(30)
    with account.holding(20), pytest.raises(ApiError, match="61 bytes"):
        account.hold(11)
    assert account.held == 30
    account.close()
    account.close()
    account.release(10)  # after its end: of what was given back already
    assert held.taken == 41
    with pytest.raises(ApiError, match="client left"):
        account.hold(1)
    other.close()
    assert held.taken == 0


def test_threads_together_hold_no_more_than_there_is() -> None:
    held, most_seen = quota(1000, 0.5), list[int]()

    def use(owner: str) -> None:
        account = Account(held, owner, 400, refusal)
        for _ in range(300):
            try:
                with account.holding(300):
                    most_seen.append(held.taken)
            except ApiError:
                pass
        account.close()

    threads = [threading.Thread(target=use, args=(f"owner {n % 3}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held.taken == 0
    assert max(most_seen) <= 900


@pytest.mark.parametrize(
    ("keys", "host", "share"),
    [
        ((), "127.0.0.1", 1.0),
        ((), "0.0.0.0", 0.5),
        (("a",), "0.0.0.0", 1.0),
        (("a", "b"), "127.0.0.1", 0.5),
    ],
)
def test_an_owners_share_is_half_where_there_can_be_several_owners(keys, host, share) -> None:
    assert ServerSettings(api_keys=keys, host=host).share_of_owner == share
    assert ServerSettings(api_keys=keys, host=host, owner_share=0.25).share_of_owner == 0.25


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_an_owners_share_outside_of_0_to_1_is_refused(share) -> None:
    with pytest.raises(OptionError, match="owner_share must be a number above 0 and at most 1"):
        ServerSettings(owner_share=share)


def test_an_owner_counts_among_the_others_until_a_moment_after_its_last_request(
    monkeypatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(quotas.time, "monotonic", lambda: now[0])
    held = quota()
    held.take("one")
    assert held.has_others("two") and not held.has_others("one")
    held.take("two")
    assert not held.crowds("two")
    held.take("two")
    assert held.crowds("two") and not held.crowds("one")
    held.give_back("two", 2)
    held.give_back("one")
    now[0] = quotas.RECENT_S
    assert held.has_others("two")
    now[0] += 0.1
    assert not held.has_others("two")
