"""Verification of a loaded model, against a reference or without one."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import torch
from torch import Tensor

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.quantised import read_settings
from qwen3_omni_neuron.compilation.loading import plan_of, resolve_model
from qwen3_omni_neuron.compilation.plan import SAME, CompilePlan
from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.noise import TALKER, Noise
from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling
from qwen3_omni_neuron.errors import CheckpointError, EngineError, OptionError
from qwen3_omni_neuron.events import SpeechResult, TextDelta
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.options import LoadOptions, RequestOptions
from qwen3_omni_neuron.prompt.media.windows import SAMPLING_RATE
from qwen3_omni_neuron.prompt.prompt import Prompt
from qwen3_omni_neuron.transcription import stream_transcript
from qwen3_omni_neuron.verification.judgement import Difference, judge
from qwen3_omni_neuron.verification.reference import (
    TOP_K,
    Arrays,
    Question,
    SavedReference,
    as_array,
    below,
    logits_arrays,
    make_questions,
    read_reference,
    text_rows,
    thinned,
)


def watch(engines: Engines, largest: dict[str, float]) -> None:
    """Record the largest magnitude of each call's results; NaN and infinity exceed all."""

    def noted(name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        result = call(*given, **named)
        is_media = isinstance(result, PromptMedia)
        parts = (result.rows, result.deepstack) if is_media else result
        for part in parts if isinstance(parts, tuple | list) else (parts,):
            array = torch.empty(0) if part is None else torch.as_tensor(part)
            if array.is_floating_point() and array.numel():
                size = float(array.abs().max())
                largest[name] = float(np.maximum(largest.get(name, 0.0), size))
        return result

    for stage in ("encoder", "thinker", "talker", "vocoder"):
        engine = getattr(engines, stage)
        for name in ("encode", "prefill", "step", "predict", "start"):
            if call := getattr(engine, name, None):
                setattr(engine, name, partial(noted, f"{stage}.{name}", call))


@dataclass(frozen=True)
class Spoken:
    """A spoken answer, and its transcript by the model; None without speech."""

    question: Question
    result: SpeechResult
    heard: str | None


@dataclass(frozen=True)
class Verdict:
    """Result of a verification.

    differences: from the reference. largest: magnitude of engine results, by stage and call.
    """

    folder: Path
    plan: CompilePlan
    reference: SavedReference | None
    differences: list[Difference]
    largest: dict[str, float]
    spoken: list[Spoken]

    @property
    def broken(self) -> list[str]:
        """Calls that returned NaN or infinity."""
        return [name for name, size in self.largest.items() if not math.isfinite(size)]

    @property
    def holds(self) -> bool:
        """True if rounding explains each stage, and all numbers are finite."""
        return not self.broken and all(one.holds for one in self.differences)


def verify(
    model: str | Path,
    against: Path | None = None,
    load: Mapping[str, Any] | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> Verdict:
    """Load a model and verify it.

    against: a file of write_reference. load: arguments of Qwen3Omni.load. Raises the errors of
    Qwen3Omni.load and read_reference.
    """
    load = dict(load or {})
    if load.pop("placement", "shared") != "shared":
        raise OptionError("verify calls engines one by one: use --placement shared.")
    options = LoadOptions.parse(load)
    folder = resolve_model(model, options)
    config = read_config(folder)
    if config.talker is None or config.code2wav is None:
        raise CheckpointError(f"{folder} can't speak, so it can't be verified.")
    tree = load.get("compiled_path")
    plan = plan_of(folder, config, tree and Path(tree), options)
    reference = None if against is None else read_reference(against, folder, plan.adapters)
    largest: dict[str, float] = {}
    built: list[Engines] = []

    def keep(engines: Engines) -> Engines:
        watch(engines, largest)
        built.append(engines)
        return engines

    progress(f"loading {folder} for target {plan.target} in {plan.dtype}")
    with Qwen3Omni.load(folder, **load, reuse=False, wrap_engines=keep) as omni:
        differences: list[Difference] = []
        if reference is not None:
            differences = compare(omni, built[0], plan, reference, progress)
            questions = [question for question, _ in reference.answers]
        else:
            questions = make_questions()
        progress("answering in speech")
        spoken: list[Spoken] = []
        with suppress(EngineError):  # NaN or infinity, recorded in `largest`
            spoken.extend(speak(omni, question) for question in questions)
    return Verdict(folder, plan, reference, differences, largest, spoken)


def compare(
    omni: Qwen3Omni,
    engines: Engines,
    plan: CompilePlan,
    reference: SavedReference,
    progress: Callable[[str], object] = lambda line: None,
) -> list[Difference]:
    """Compare all stages of an idle model with a reference."""
    config, pairs, answers = read_config(plan.model), [], reference.answers
    is_quantised = read_settings(plan.model) is not None
    # Whether the reference was also computed with this plan's weights.
    rounded = (
        plan.target == "cpu" and not is_quantised and bool(below(answers[0][1], f"{plan.dtype}/"))
    )
    for number, (question, exact) in enumerate(answers, 1):
        progress(f"{number} of {len(answers)}: {question.title}")
        expected = exact
        if rounded:
            predictor = exact | below(exact, "mixed/")
            expected = exact | below(exact, f"{plan.dtype}/")
            if plan.predictor_dtype != SAME:
                codes = ("greedy_codes", "greedy_margins", "sampled_codes", "sampled_margins")
                expected |= {name: predictor[name] for name in codes}
        prompt = omni.prompt_builder.prompt(question.messages)
        ours = {"prompt": prompt.token_ids.numpy()}
        if np.array_equal(expected["prompt"], ours["prompt"]):
            ours |= run_stages(engines, config, prompt, exact)
        pairs.append((expected, ours))
    return judge(config, plan, reference.dtype, rounded, pairs)


def speak(omni: Qwen3Omni, question: Question) -> Spoken:
    """Answer a question in speech, with seed 0, and transcribe the answer."""
    limits: dict[str, Any] = {"thinker_max_new_tokens": 64, "talker_max_new_tokens": 400}
    result = omni.generate_audio(question.messages, seed=0, **limits)
    if not len(result.audio):
        return Spoken(question, result, None)
    audio = soxr.resample(result.audio, result.sample_rate, SAMPLING_RATE)
    item = {"audio": audio.clip(-1, 1), "sampling_rate": SAMPLING_RATE}
    events = stream_transcript(omni, item, max_new_tokens=128)
    heard = "".join(event.text for event in events if isinstance(event, TextDelta))
    return Spoken(question, result, heard)


@torch.inference_mode()
def run_stages(engines: Engines, config: OmniConfig, prompt: Prompt, given: Arrays) -> Arrays:
    """Compute every stage of a question from a reference's inputs, in slot 0."""
    assert engines.talker is not None and engines.vocoder is not None
    codes, chunk_frames = torch.from_numpy(given["codes"]), engines.vocoder.chunk_frames
    # Several chunks, to test the vocoder's state.
    fitting = [frames for frames in chunk_frames if 2 * frames <= len(codes)]
    first, *later = codes.split(max(fitting, default=min(chunk_frames)))
    sound = engines.vocoder.start([0], [first])
    sound += [engines.vocoder.step([0], [chunk])[0] for chunk in later]
    return {
        **_thinker_results(engines.thinker, config, prompt, given),
        **_talker_results(engines.talker, config, prompt, given),
        "samples": np.concatenate(sound),
    }


def _thinker_results(thinker: Any, config: OmniConfig, prompt: Prompt, given: Arrays) -> Arrays:
    c = config.thinker
    media = thinker.media.encode(prompt)
    if media is None:
        width, levels = c.text.hidden_size, 1 + len(c.vision.deepstack_layers)
        found: Arrays = {"audio": np.empty((0, width)), "vision": np.empty((levels, 0, width))}
    else:
        is_audio = prompt.token_ids[media.filled] == c.audio_token_id
        visual = torch.cat((media.rows[~is_audio][None], media.deepstack))
        found = {"audio": as_array(media.rows[is_audio]), "vision": as_array(visual)}
        rows = media.rows.clone()
        audio, vision = (torch.from_numpy(given[name]).to(rows) for name in found)
        rows[is_audio], rows[~is_audio] = audio, vision[0]
        media = PromptMedia(media.start, media.filled, rows, media.visual, vision[1:])
    logits, accepted = thinker.prefill(0, prompt, 0, media)
    ids = given["token_ids"].tolist()
    tokens = [logits, *(thinker.step([0], [token]) for token in ids[:-1])]
    found["accepted"] = as_array(accepted)
    return {**found, **logits_arrays("thinker", torch.cat(tokens))}


def _talker_results(talker: Any, config: OmniConfig, prompt: Prompt, given: Arrays) -> Arrays:
    codes, noise = given["codes"], Noise(int(given["seed"]), TALKER)
    text = text_rows(config, given["token_ids"].tolist(), len(codes))
    projected = talker.text_rows(torch.tensor(text))
    accepted = torch.from_numpy(given["accepted"]).to(projected)
    media = talker.project_hidden(accepted) if len(accepted) else projected[:0]
    hidden, feedback = (torch.from_numpy(given[name]) for name in ("hidden", "feedback"))
    talker.prepare(0, prompt.talker, RequestOptions().speaker_id(config))
    logits = [talker.prefill(0, accepted.to(talker.rows(0)[0]), text[0])]
    found: dict[str, list[Tensor]] = {
        name: [] for name in ("hidden", "sampled_codes", "greedy_codes", "feedback")
    }
    for frame, code0 in enumerate(codes[:, 0].tolist()):
        found["hidden"].append(talker.rows(0)[0].clone())
        for kind, start in (("sampled", noise.at(frame)), ("greedy", None)):
            talker.set_rows(0, hidden[frame, None], feedback[frame, None])
            sampling = PredictorSampling(start, TOP_K, 1.0)
            found[f"{kind}_codes"].append(talker.predict([0], [code0], [sampling]))
        found["feedback"].append(talker.rows(0)[1].clone())
        talker.set_rows(0, hidden[frame, None], feedback[frame, None])
        if frame + 1 < len(codes):
            logits.append(talker.step([0], [text[frame + 1]]))
    joined = {name: torch.cat(rows) for name, rows in found.items()}
    return {
        "text_projection": thinned(projected),
        "hidden_projection": thinned(media),
        **logits_arrays("talker", torch.cat(logits)),
        **{name: as_array(joined[name]) for name in ("hidden", "feedback")},
        **{name: joined[name].numpy() for name in ("greedy_codes", "sampled_codes")},
    }
