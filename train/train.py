"""Train the speaking checkpoint: `python -m train.train --out FOLDER`.

code2wav learns the audio of every word; thinker and audio encoder the replies, then conversations
of several turns; talker and code predictor the codes of replies. Two of these steps run at a time,
each in a process with half of the cores. A stopped run is resumed when it is started again with the
same --work. About 90 minutes on two CPU cores; a GPU is used where there is one.
"""

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import Qwen2TokenizerFast

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from train.checkpoint import load_model, write_skeleton, write_trained
from train.codes import spoken_words
from train.learn_code2wav import learn_code2wav
from train.learn_talker import Teacher, learn_talker
from train.learn_thinker import learn_thinker, learn_turns


class Training:
    """The model in training, and the steps of its recipe, each resumed from `work`."""

    def __init__(self, work: Path):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
        self._work, self._skeleton = work, work / "skeleton"
        self.model = load_model(self._skeleton)
        self._prompt_builder = PromptBuilder(self._skeleton, read_config(self._skeleton))
        self._tokenizer = Qwen2TokenizerFast.from_pretrained(self._skeleton)

    def code2wav(self) -> None:
        learn_code2wav(self.model, spoken_words(), self._work)

    def thinker(self) -> None:
        learn_thinker(self.model, self._prompt_builder, self._tokenizer, self._work)

    def turns(self) -> None:
        learn_turns(self.model, self._prompt_builder, self._tokenizer, self._work)

    def talker(self) -> None:
        teacher = Teacher(
            self.model, self._prompt_builder, self._tokenizer, spoken_words(), self._skeleton
        )
        learn_talker(self.model, teacher, self._work)


def learn(steps: Sequence[str], work: Path) -> None:
    """Train some steps, methods of Training, one after the other."""
    training = Training(work)
    for step in steps:
        getattr(training, step)()


def main(arguments: list[str] | None = None) -> None:
    """Train, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--work", type=Path, default=Path("train-work"), help="folder of intermediate state"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights; default: 0")
    options = parser.parse_args(arguments)
    work = options.work
    if not (work / "skeleton" / "config.json").exists():
        write_skeleton(work / "skeleton", options.seed)
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        code2wav = processes.submit(learn, ["code2wav"], work)
        processes.submit(learn, ["thinker"], work).result()
        both = [processes.submit(learn, ["thinker", step], work) for step in ("turns", "talker")]
        for running in (code2wav, *both):
            running.result()
    trained = Training(work)
    for step in (trained.code2wav, trained.thinker, trained.turns, trained.talker):
        step()  # each is done, and is only read
    write_trained(trained.model, options.out)


if __name__ == "__main__":
    main()
