"""bench/quality.py: what it reads, counts, refuses; and the gate of the checkpoint that ships."""

import pytest

from bench import quality
from testing.command_line import InputError
from testing.results import load_results

# Measured: 43 % of the words are wrong, of espeak-ng's 66 %, against other sentences 98 %.
MOST_OF_CHANCE = 0.6


def test_errors_are_counted_over_all_words_or_characters() -> None:
    pairs = [("Red, one!", "red one"), ("blue two yes no", "blue yes no")]
    assert quality.error_rate(pairs, "en") == pytest.approx(1 / 6)
    assert quality.error_rate([("你好吗", "你好")], "zh") == pytest.approx(1 / 3)
    with pytest.raises(InputError, match=r"'Um\.' has no words"):
        quality.error_rate([("Um.", "red")], "en")


def test_the_checkpoint_that_ships_is_understood_by_another_recogniser(tmp_path) -> None:
    pytest.importorskip("pocketsphinx", reason="no wheel of pocketsphinx for this machine")
    file = tmp_path / "r.json"
    assert quality.main(["--json", str(file)]) == 0
    found = load_results(file)
    summary = found.summary
    assert len(found.rows) == 30
    assert summary["error_rate"] < MOST_OF_CHANCE * summary["chance"]
    assert summary["error_rate"] < summary["reference_wer"]
    assert {"Aiden", "Chelsie", "Ethan"} == set(summary["voices"])
    assert summary["clipped"] == 0
    assert 0 < summary["silence_s"] < 0.5
    assert 0.3 < summary["word_s"] < 1.2
