"""The compile plan: what is compiled, for what, in which sizes."""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.config import OmniConfig

HEARING_GRAPHS = ("thinker", "vision", "audio")
SPEAKING_GRAPHS = ("talker", "code_predictor", "code2wav")
GRAPHS = (*HEARING_GRAPHS, *SPEAKING_GRAPHS)
CHUNK_FRAMES = (1, 2, 4, 8, 16, 25)
# The parts of each graph, by their names in loading.Models.
GRAPH_PARTS = {
    "thinker": ("thinker",),
    "vision": ("vision_encoder",),
    "audio": ("audio_encoder",),
    "talker": ("talker", "text_projection", "hidden_projection"),
    "code_predictor": ("code_predictor",),
    "code2wav": ("code2wav",),
}
GRAPH_STAGES = dict.fromkeys(("thinker", "vision", "audio"), "thinker") | {
    "talker": "talker",
    "code_predictor": "talker",
    "code2wav": "vocoder",
}
GRAPH_OF_PART = {part: graph for graph, parts in GRAPH_PARTS.items() for part in parts}
_EVERY_GRAPH = ("target", "tp", "lnc", "profile", "dtype")
_DECODER = ("max_concurrency", "context_length", "prompt_buckets", "decode_buckets", "batches")
_BY_GRAPH = {
    "thinker": _DECODER,
    "vision": ("patch_buckets",),
    "audio": ("audio_windows",),
    "talker": (*_DECODER, "talker_context_length", "projection_rows"),
    "code_predictor": ("max_concurrency", "batches", "predictor_top_k"),
    "code2wav": ("max_concurrency", "batches", "chunk_frames"),
}


@dataclass(frozen=True)
class CompilePlan:
    """Made by `planning.make_plan`, which checks it.

    model: the checkpoint's folder; where it lies is no part of what is compiled. tp: cores that
    share a graph's weights. lnc: physical cores a logical one. profile: "safe" or "fast", see
    README. max_concurrency: slots, requests at a time. context_length: positions that a slot's KV
    cache holds. talker_context_length: those of the talker's.
    Sizes, ascending; on a CPU those that are empty are of any length, which it has no need to pad:
    prompt_buckets: rows of a prompt. decode_buckets: positions that a decode step looks back on.
    patch_buckets: patches of a picture or a video frame. audio_windows: windows of 8 s a call.
    projection_rows: rows that the talker's projections take at once. batches: slots that a step
    renews. chunk_frames: that the vocoder decodes. predictor_top_k: the largest that the code
    predictor samples with; 0: any.
    """

    model: Path
    target: str
    tp: int
    lnc: int
    profile: str
    dtype: str
    max_concurrency: int
    context_length: int
    talker_context_length: int
    prompt_buckets: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    patch_buckets: tuple[int, ...]
    audio_windows: tuple[int, ...]
    projection_rows: tuple[int, ...]
    batches: tuple[int, ...]
    chunk_frames: tuple[int, ...]
    predictor_top_k: int

    @property
    def settings(self) -> dict[str, Any]:
        """All but where the checkpoint lies, as JSON has it: what `make_plan` takes."""
        settings = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        del settings["model"]
        return settings

    def graph_settings(self, graph: str) -> dict[str, Any]:
        """The part that one graph depends on. graph: one of GRAPHS."""
        return {name: self.settings[name] for name in (*_EVERY_GRAPH, *_BY_GRAPH[graph])}

    def command(self, out: Path) -> str:
        """The command line that compiles this plan into the folder `out`."""
        words = ["qwen3-omni-neuron", "compile", "--model", str(self.model), "--out", str(out)]
        for name, value in self.settings.items():
            if value not in ([], 0):
                words += [
                    flag_of(name),
                    ",".join(map(str, value)) if isinstance(value, list) else str(value),
                ]
        return shlex.join(words)


def graphs_of(config: OmniConfig) -> tuple[str, ...]:
    """The graphs of a checkpoint; one without a talker has fewer."""
    speaks = config.talker is not None and config.code2wav is not None
    return GRAPHS if speaks else HEARING_GRAPHS


def flag_of(setting: str) -> str:
    """A setting's name on the command line."""
    return "--buckets" if setting == "prompt_buckets" else f"--{setting.replace('_', '-')}"
