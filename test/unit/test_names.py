"""Names in docstrings, comments and documents exist, and docstrings begin as sentences."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.imports import PACKAGE, ROOT
from testing.names import CODE_FOLDERS, Found, docstrings, index, unresolved, unresolved_in

DOCUMENTS = "documents"
ROOMS = sorted(
    str(path.relative_to(ROOT))
    for path in PACKAGE.iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
)
SCOPES = [*ROOMS, *sorted(set(CODE_FOLDERS) - {"src"}), DOCUMENTS]
SUFFIXES = (".py", ".c", ".h", ".md", ".toml", ".txt", "Makefile", ".ci/run")

# Words with capitals inside that are no class of this repository.
WORDS = {
    *(
        "DashScope",
        "KiB",
        "LibriSpeech",
        "LangChain",
        "LiveKit",
        "ModelScope",
        "MoE",
        "SoX",
        "uuid",
    ),
    *("DoRA", "LoRA"),
    *("KubeRay", "NeuronCores", "NxD", "TorchScript"),
    *("GitHub", "JavaScript", "WebRTC", "WebSocket", "WebSockets", "SplitMix64"),
}
# Folders of a compiled tree.
TREE = ("compiled/", "thinker/", "vision/", "audio/", "talker/", "code_predictor/", "code2wav/")
# Names that exist elsewhere, with the reason.
ELSEWHERE = {
    "malloc.h": "a header of glibc",
    "speak_lib.h": "a header of espeak-ng",
    "to_cpu": "a method of NxDI's applications",
    "--extra-index-url": "an option of pip",
    "--build-arg": "an option of docker",
    "--entrypoint": "an option of docker",
    "--stop-timeout": "an option of docker",
    "flush_interval": "an option of Caddy",
    ".trans.txt": "how LibriSpeech's transcript files end",
    "keys.txt": "a file that the server's operator writes",
    "utils_vad.py": "a file of silero-vad",
    "speech.audio.delta": "an event of OpenAI's API",
    "speech.audio.done": "an event of OpenAI's API",
    "WebUI": "half of the name of Open WebUI",
    "uniqueItems": "a keyword of JSON Schema",
    "dist/": "a folder that `make wheels` makes",
    "pypi": "an environment of the repository at GitHub",
    "sglang.bench_serving": "a module of sglang",
    "Upgrade": "a header of HTTP",
    "client_metadata": "a field that engines' clients send",
    "PodDisruptionBudget": "a kind of Kubernetes",
    **dict.fromkeys(("--base-url", "--tokenizer"), "options of vllm bench and of sglang's"),
    **dict.fromkeys(
        ("--api-url", "--api-key", "--eval-type", "--model-args", "--datasets", "seed_tts_eval"),
        "options and a data set of evalscope",
    ),
    "manifest.jsonl": "a file that the caller of bench/asr.py writes",
    **dict.fromkeys(
        ("generateText", "streamText", "generateObject", "supportsStructuredOutputs"),
        "functions and an option of the AI SDK",
    ),
    "withStructuredOutput": "a method of LangChain",
}
# Dotted names that exist elsewhere, for which a string of the code is enough: a method of browsers,
# and a machine's name that readers replace by theirs.
DOTTED = ("AudioContext.setSinkId", "omni.lan")
# Events of OpenAI's Realtime API, and fields of its sessions.
REALTIME = re.compile(r"(?:session|conversation|response|audio)\.[a-z][a-z_.]*")
TORCHNEURON = {  # of aws-neuron/torch-neuronx
    "torch_neuronx/neuron_dynamo_backend/",
    "torch_neuronx/neuron_dynamo_backend/decompositions.py",
    "torch_neuronx/neuron_dynamo_backend/fx/fx_transform.py",
    "torch_neuronx/distributed/backend.py",
    "fx/passes/dynamic_shape_analysis.py",
    "fx/passes/collective_legalization.py",
    "fx/passes/functionalize_copy_inplace_result.py",
    "lib/Conversion/TorchToStablehlo/",  # of llvm/torch-mlir
}
RAY = {  # Ray's options, variables and classes, and the fields of a Serve YAML
    *("RAY_ADDRESS", "--resources", "--metrics-export-port", "AutoscalingContext"),
    *("autoscaling_config", "min_replicas", "max_replicas", "upscale_delay_s"),
    *("downscale_delay_s", "policy_function", "policy_kwargs", "health_check_period_s"),
    *("max_surge_percent", "ray_"),
}
BY_HAND = {  # names of clients that no test runs: docs/agent.md
    *("ContextOverflowError", "ContextWindowExceededError", "model_providers.qwen"),
    *("model_provider", "wire_api", "additional_tools", "from_vllm", "from_sglang"),
    *("whitespace_pattern", "JSON_SCHEMA", "FUNCTIONS", "MD_JSON"),
}
# A first line that begins so is no sentence and no noun phrase that stands alone.
FORBIDDEN_BEGINNINGS = ("Of", "What", "As", "But", "So", "How", "Where", "Whether")


def files_of(scope: str) -> Iterator[str]:
    for name in sorted(index().paths - {"CHANGELOG.md"}):  # which names what earlier versions had
        folder = any(name == s or name.startswith(f"{s}/") for s in SCOPES)
        inside = name == scope or name.startswith(f"{scope}/")
        if name.endswith(SUFFIXES) and (inside or (scope == DOCUMENTS and not folder)):
            yield name


def is_known(found: Found) -> bool:
    known = {*WORDS, *TREE, *ELSEWHERE, *TORCHNEURON, *RAY, *BY_HAND}
    return found.name in known or bool(REALTIME.fullmatch(found.name))


@pytest.mark.parametrize("scope", SCOPES)
def test_every_name_in_prose_exists(scope) -> None:
    files = list(files_of(scope))
    assert files
    missing = [found for file in files for found in unresolved(file) if not is_known(found)]
    assert not missing, f"{len(missing)} names of nothing:\n" + "\n".join(map(str, missing))


def test_no_exception_is_left_over() -> None:
    found = {f.name for scope in SCOPES for file in files_of(scope) for f in unresolved(file)}
    assert not {*WORDS, *TREE, *ELSEWHERE, *TORCHNEURON} - found


def test_a_name_that_exists_is_found() -> None:
    for line in (
        "See checkpoint.parameters.load_parts and `model/kv_cache.py`.",
        "qwen3_omni_neuron.api.Qwen3Omni.load, Qwen3Omni.generate_audio, KvCache",
        "`make test-nxdi`, `python -m bench.stages`, testing/results.py, cpu/native/",
        "`qwen3-omni-neuron doctor`, --thinker-top-k 3, --chunk-frames, --dry-run",
        "transformers Qwen3OmniMoeCode2Wav.forward, torch.export, np.ndarray, e.g. 2.31 or and/or",
        "tts_eos, max_concurrency, `seed`, engines.protocols.Thinker.prefill",
    ):
        assert unresolved_in(line, "README.md") == []


def test_a_name_of_nothing_is_reported() -> None:
    for line, kind, name in (
        ("See weights.load_parts.", "name", "weights.load_parts"),
        ("See checkpoint.parameters.load_part.", "name", "checkpoint.parameters.load_part"),
        ("api.Qwen3Omni.speak does it.", "name", "api.Qwen3Omni.speak"),
        ("Qwen3Omni.speak does it.", "name", "Qwen3Omni.speak"),
        ("A KvCaches holds rows.", "class", "KvCaches"),
        ("In compiling/ it lies.", "path", "compiling/"),
        ("`neuron/no_such_room.py`", "path", "neuron/no_such_room.py"),
        ("`no_such_room.py`", "path", "no_such_room.py"),
        ("It is load_all_parts that does.", "identifier", "load_all_parts"),
        ("`loadings`", "identifier", "loadings"),
        ("Run `make all-of-it`.", "make", "all-of-it"),
        ("make all-of-it", "make", "all-of-it"),
        ("Run `python -m bench.stage`.", "module", "bench.stage"),
        ("Run `qwen3-omni-neuron sing`.", "verb", "sing"),
        ("With --thinker-top-n 3.", "flag", "--thinker-top-n"),
    ):
        assert (kind, name) in unresolved_in(line, "README.md")


@pytest.mark.parametrize("folder", sorted(CODE_FOLDERS))
def test_no_docstring_begins_in_the_middle_of_a_sentence(folder) -> None:
    wrong = [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name, tree in index().sources.items()
        if Path(name).parts[0] == folder
        for line, text in docstrings(tree)
        if text.split(maxsplit=1) and text.split(maxsplit=1)[0].rstrip(",:") in FORBIDDEN_BEGINNINGS
    ]
    assert not wrong, f"{len(wrong)} docstrings:\n" + "\n".join(wrong)
