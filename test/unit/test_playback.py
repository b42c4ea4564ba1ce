"""Estimated playback of speech that arrives in chunks."""

from qwen3_omni_neuron.runtime.schedule import Playback


def test_playback_waits_where_speech_is_late() -> None:
    playback = Playback()
    arrivals = ((10.0, 1.0), (10.5, 1.0), (12.25, 1.0), (13.0, 0.5))
    spans = [playback.arrived(seconds, at_s) for at_s, seconds in arrivals]
    assert spans == [(10.0, 11.0), (11.0, 12.0), (12.25, 13.25), (13.25, 13.75)]
    assert (playback.underruns, playback.silent_s) == (1, 0.25)


def test_what_was_heard_and_what_is_left_add_up_to_what_was_sent() -> None:
    now_s = 100.0
    playback = Playback(lambda: now_s)
    assert (playback.heard_s, playback.left_s) == (0.0, 0.0)
    playback.arrived(1.0)
    now_s = 100.25
    playback.arrived(2.0)
    assert (playback.heard_s, playback.left_s) == (0.25, 2.75)
    now_s = 104.0
    assert (playback.heard_s, playback.left_s) == (3.0, 0.0)
    playback.arrived(1.0)  # after a pause
    now_s = 104.5
    assert (playback.heard_s, playback.left_s, playback.sent_s) == (3.5, 0.5, 4.0)


def test_speech_that_follows_other_speech_is_played_after_it() -> None:
    now_s = 100.0
    playback = Playback(lambda: now_s)
    playback.until_s = 102.0
    assert playback.arrived(1.0) == (102.0, 103.0)
    assert (playback.heard_s, playback.left_s) == (0.0, 3.0)
    now_s = 102.5
    assert (playback.heard_s, playback.left_s) == (0.5, 0.5)
    late = Playback(lambda: now_s)
    late.until_s = 102.0
    late.arrived(1.0)
    assert (late.underruns, late.silent_s) == (0, 0.0)
