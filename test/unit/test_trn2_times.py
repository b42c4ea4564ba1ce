"""The times of a spoken question, which follow from the table of costs."""

import pytest

from bench.trn2 import cost
from bench.trn2.times import Calls, SpeechCalls, main
from qwen3_omni_neuron.checkpoint.config_json import read_config
from testing.torchneuron.leaner import write_leaner_checkpoint

# The times of a reply, against the package's own schedule on a virtual clock


def calls(token_s: float, step_s: float, predict_s: float, vocoder_s: float) -> Calls:
    """Calls whose chunks take 3 ms and vocoder_s a frame."""
    chunk_s = {n: 0.003 + n * vocoder_s for n in (1, 2, 4, 8, 16, 25)}
    speech = SpeechCalls(0.012, step_s, predict_s, chunk_s, 0.08, 555 / 24000)
    return Calls(0.007, 0.021, token_s, speech)


def columns(text: str, first: str) -> dict[str, list[str]]:
    """Cells of the table whose head begins so, by the first cell of each row."""
    lines = text[text.index(first) :].split("\n\n", maxsplit=1)[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_every_number_follows_from_the_rows_of_the_table(tmp_path, capsys, monkeypatch) -> None:
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
    assert text.startswith("trn2.3xlarge, TP 2: shared. ")
    said, rows = columns(text, "|  |"), columns(text, "| graph |")
    assert said[""] == [f"trn2.3xlarge: {column}" for column in ("low", "likely", "high", "least")]
    for column, head in enumerate(("low ms", "likely ms", "high ms", "floor ms")):
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
        saved = (0.44, 2 * 0.7, 2 * 3.5, 0.0)[column]  # a wait, or two copies
        total = ttfb + 66 * token + 198 * (step + predictor - saved + vocoder)
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
