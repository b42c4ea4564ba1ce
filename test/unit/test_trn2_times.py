"""The times of a spoken question, which follow from the table of costs."""

from pathlib import Path

import pytest

from bench.trn2 import cost
from bench.trn2.times import (
    FRAMES,
    PROMPT_ROWS,
    SPEECH_S,
    TEXT_TOKENS,
    Calls,
    SpeechCalls,
    main,
    reply_times,
)
from qwen3_omni_neuron.checkpoint.config_json import read_config
from testing.replaying.cases import OURS
from testing.replaying.load import RequestLengths
from testing.replaying.profiles import STAGES, StageLatency, StageProfile
from testing.replaying.simulation import replay
from testing.torchneuron.leaner import write_leaner_checkpoint

# The times of a reply, against the package's own schedule on a virtual clock


def calls(token_s: float, step_s: float, predict_s: float, vocoder_s: float) -> Calls:
    """Calls whose chunks take 3 ms and vocoder_s a frame."""
    chunk_s = {n: 0.003 + n * vocoder_s for n in (1, 2, 4, 8, 16, 25)}
    speech = SpeechCalls(0.012, step_s, predict_s, chunk_s, 0.08, 555 / 24000)
    return Calls(0.007, 0.021, token_s, speech)


@pytest.mark.parametrize("placement", ["shared", "split"])
@pytest.mark.parametrize(
    "made",
    [
        calls(0.004, 0.003, 0.005, 0.0004),
        calls(0.030, 0.003, 0.005, 0.0004),  # a token takes longer than a frame
        calls(0.004, 0.012, 0.030, 0.0004),  # frames so slow that the first chunk has two
        calls(0.004, 0.003, 0.005, 0.0120),  # a chunk takes longer than its frames
    ],
    ids=["usual", "thinker", "talker", "vocoder"],
)
def test_times_are_those_of_the_packages_schedule(made: Calls, placement: str) -> None:
    """The third of three questions: by then the pace of frames and calls is known."""
    speech = made.speech
    assert speech is not None
    seconds: dict[str, dict[int, float]] = {
        "encoders": {1: made.encode_s},
        "thinker_prefill": {PROMPT_ROWS: made.prefill_s},
        "thinker_decode": {1: made.token_s},
        "talker_prefill": {PROMPT_ROWS: speech.prefill_s},
        "talker_step": {1: speech.step_s},
        "code_predictor": {1: speech.predict_s},
        "code2wav_start": dict(speech.chunk_s),
        "code2wav_step": dict(speech.chunk_s),
    }
    stages = {
        name: StageLatency(name, "line", tuple(seconds.get(name, {0: 0.0}).items()), "made up")
        for name in STAGES
    }
    question = RequestLengths(PROMPT_ROWS, PROMPT_ROWS, SPEECH_S, TEXT_TOKENS, FRAMES)
    profile = StageProfile("made up", "made up", stages)
    replied = replay(profile, OURS, placement, 1, [question] * 3).replies[-1].result.timings
    times = reply_times(made, placement == "shared")
    assert times.ttft_s == pytest.approx(replied.ttft_s)
    slow_vocoder = speech.vocoder_frame_s > speech.step_s + speech.predict_s
    if not slow_vocoder:
        assert times.ttfb_s == pytest.approx(replied.ttfb_s)
    assert times.rtf == pytest.approx(replied.rtf, rel=0.08 if slow_vocoder else 0.03)


# The calls of the question, and the numbers of a table


def columns(text: str, first: str) -> dict[str, list[str]]:
    """Cells of the table whose head begins so, by the first cell of each row."""
    lines = text[text.index(first) :].split("\n\n", maxsplit=1)[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_every_number_follows_from_the_rows_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: shared, all calls one after the other; here a frame has 0.25 ms of audio, so that
    the first chunk is the largest.
    """
    folder = write_leaner_checkpoint(tmp_path)
    words = ["--model", str(folder), "--tp", "2", "--dtype", "float32", "--max-concurrency", "1"]
    words += ["--buckets", "128", "--context-length", "256", "--talker-context-length", "512"]
    words += ["--decode-buckets", "256", "--chunk-frames", "1,2", "--patch-buckets", "64"]
    words += ["--audio-windows", "1", "--predictor-dtype", "same"]
    # Slow enough that the tables' digits tell the small graphs apart.
    monkeypatch.setattr(cost, "BYTES_PER_S", cost.BYTES_PER_S / 1e4)
    monkeypatch.setattr(cost, "FLOPS_PER_S", cost.FLOPS_PER_S / 1e4)
    main(words)
    text, wav = capsys.readouterr().out, read_config(folder).code2wav
    assert wav is not None
    assert text.startswith("trn2.3xlarge, TP 2: shared. ")
    said, rows = columns(text, "|  |"), columns(text, "| graph |")
    assert said[""] == ["trn2.3xlarge: expected", "trn2.3xlarge: least"]
    for column, head in enumerate(("expected ms", "floor ms")):
        of = rows["graph"].index(head)

        def ms(label: str, of: int = of) -> float:
            return float(rows[label][of])

        token = ms("thinker_decode[slots=1,window=256]") + ms("thinker_flush[window=256]") / 32
        step = ms("talker_decode[slots=1,window=512]") + ms("talker_flush[window=512]") / 32
        predictor = ms("code_predictor[slots=1,top_k=50]")
        vocoder = ms("code2wav[streams=1,frames=2]") / 2
        ttft = ms("audio_encoder[windows=1]") + ms("thinker_prefill[rows=128,window=256]")
        ttfb = ttft + ms("hidden_projection[rows=512]") + ms("talker_prefill[rows=128,window=512]")
        ttfb += predictor + (token + step + predictor)
        ttfb += 2 * vocoder
        total = ttfb + 66 * token + 198 * (step + predictor + vocoder)
        audio = (200 * wav.frame_samples - wav.latency_samples) / 24000 * 1e3
        expected = {
            "first token (TTFT), ms": ttft,
            "first sound (TTFB), ms": ttfb,
            "RTF": total / audio,
            "thinker, ms a token": token,
            "talker, ms a frame": step,
            "code predictor, ms a frame": predictor,
            "code2wav, ms a frame": vocoder,
        }
        for name, value in expected.items():
            assert float(said[name][column]) == pytest.approx(value, rel=1e-3, abs=0.01), name
        totals = {
            "thinker": 68 * token,
            "talker": 200 * step,
            "code predictor": 200 * predictor,
            "code2wav": 200 * vocoder,
        }
        assert said["what limits"][column] == max(totals, key=lambda part: totals[part])
