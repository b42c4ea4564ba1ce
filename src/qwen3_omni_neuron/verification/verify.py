"""Verifies a loaded model: against a reference, and by checks that need none."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import resolve_checkpoint
from qwen3_omni_neuron.checkpoint.quantised import read_settings
from qwen3_omni_neuron.compilation.loading import plan_of
from qwen3_omni_neuron.compilation.plan import SAME, CompilePlan
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.errors import CheckpointError, OptionError
from qwen3_omni_neuron.options import LoadOptions
from qwen3_omni_neuron.verification.alone import Seen, Spoken, speak, watched
from qwen3_omni_neuron.verification.judgement import (
    Difference,
    NumberTypes,
    judge,
)
from qwen3_omni_neuron.verification.questions import make_questions
from qwen3_omni_neuron.verification.reference import (
    About,
    Arrays,
    ReferenceAnswer,
    read_reference,
)
from qwen3_omni_neuron.verification.stages import EngineStages


@dataclass(frozen=True)
class Verdict:
    """Result of a verification. about, differences: from the reference. seen: by the engines."""

    folder: Path
    plan: CompilePlan
    about: About | None
    differences: list[Difference]
    seen: Seen
    spoken: list[Spoken]

    @property
    def holds(self) -> bool:
        """True if rounding explains each stage, and no number is NaN or infinite."""
        return not self.seen.broken and all(one.holds for one in self.differences)


def verify(
    model: str | Path,
    against: Path | None = None,
    load: Mapping[str, Any] | None = None,
    most_spoken: int | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> Verdict:
    """Load a model and verify it.

    against: a file that write_reference wrote. load: arguments of Qwen3Omni.load. most_spoken:
    number of questions that are answered in speech. Raises the errors of Qwen3Omni.load and of
    read_reference.
    """
    folder, load = resolve_checkpoint(model), dict(load or {})
    if load.pop("placement", "shared") != "shared":
        raise OptionError("verify calls engines one by one, in one process: placement is shared.")
    config = read_config(folder)
    if config.talker is None or config.code2wav is None:
        raise CheckpointError(f"{folder} can't speak: verify is for checkpoints that can.")
    if load.get("compiled_path") is not None:
        load["compiled_path"] = Path(load["compiled_path"])
    about: About | None = None
    answers: list[ReferenceAnswer] = []
    plan = plan_of(folder, config, load.get("compiled_path"), LoadOptions.parse(load))
    if against is not None:
        about, answers = read_reference(against, folder, config, plan.adapters)
    seen, built = Seen(), []

    def watch(engines: Engines) -> Engines:
        built.append(watched(engines, config, seen))
        return built[0]

    progress(f"loading {folder} for target {plan.target} in {plan.dtype}")
    with Qwen3Omni.load(folder, **load, reuse=False, wrap_engines=watch) as omni:
        differences = compare(omni, built[0], plan, about, answers, progress) if about else []
        asked = [answer.question for answer in answers] or make_questions()
        progress("answering in speech")
        spoken = list(speak(omni, seen, asked[:most_spoken]))
    return Verdict(folder, plan, about, differences, seen, spoken)


def compare(
    omni: Qwen3Omni,
    engines: Engines,
    plan: CompilePlan,
    about: About,
    answers: list[ReferenceAnswer],
    progress: Callable[[str], object] = lambda line: None,
) -> list[Difference]:
    """Compare all stages of a loaded model, which has no other work, with a reference."""
    config, pairs = read_config(plan.model), []
    stages = EngineStages(engines, config)
    for number, answer in enumerate(answers):
        progress(f"{number + 1} of {len(answers)}: {answer.question.title}")
        prompt = omni.prompt_builder.prompt(answer.question.messages)
        ours = stages.run(prompt, answer) if _fits(prompt.token_ids, answer) else {}
        ours.setdefault("prompt", prompt.token_ids.numpy())
        pairs.append((answer, _expected(plan, answer), ours))
    return judge(config, _numbers(plan, about, answers[0]), pairs)


def _fits(token_ids: Any, answer: ReferenceAnswer) -> bool:
    given: list[int] = answer.arrays["prompt"].tolist()
    return given == token_ids.tolist()


def _expected(plan: CompilePlan, answer: ReferenceAnswer) -> Arrays:
    """Return the reference's results for the weights of the CPU's engines."""
    if not _is_rounded(plan, answer):
        return answer.arrays
    rounded = answer.rounded[plan.dtype]
    if plan.predictor_dtype == SAME:
        return rounded
    mixed = answer.rounded.get("mixed", answer.arrays)
    ours = {n: a for n, a in mixed.items() if n.startswith(("greedy_", "sampled_"))}
    return {**rounded, **ours}


def _is_rounded(plan: CompilePlan, answer: ReferenceAnswer) -> bool:
    """The reference has computed with this plan's weights, too."""
    is_quantised = read_settings(plan.model) is not None
    return plan.target == "cpu" and plan.dtype in answer.rounded and not is_quantised


def _numbers(plan: CompilePlan, about: About, answer: ReferenceAnswer) -> NumberTypes:
    """Return the coarsest numbers of the plan's engines or the reference."""
    wide = "float32" if about.dtype != "bfloat16" else "bfloat16"
    activations, predictor = (
        "bfloat16" if "bfloat16" in (wide, own) else "float32"
        for own in (plan.arithmetic, plan.predictor_arithmetic)
    )
    weights = "" if plan.dtype not in ("int8", "int4") or _is_rounded(plan, answer) else plan.dtype
    encoders = "int8" if weights and plan.target == "cpu" else ""
    return NumberTypes(activations, predictor, weights, encoders)
