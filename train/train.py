"""Train the speaking checkpoint: `python -m train.train --out FOLDER`.

Three steps, each on top of the one before: code2wav learns the audio of every word, thinker and
audio encoder the replies, talker and code predictor their codes. A stopped run is resumed when it
is started again with the same --work. About 90 minutes on two CPU cores; a GPU is used where there
is one.
"""

import argparse
from pathlib import Path

from transformers import Qwen2TokenizerFast

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from train.checkpoint import load_model, write_skeleton, write_trained
from train.codes import spoken_words
from train.learn_code2wav import learn_code2wav
from train.learn_talker import Teacher, learn_talker
from train.learn_thinker import learn_thinker


def main(arguments: list[str] | None = None) -> None:
    """Train, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--work", type=Path, default=Path("train-work"), help="folder of intermediate state"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights; default: 0")
    options = parser.parse_args(arguments)
    skeleton = options.work / "skeleton"
    if not (skeleton / "config.json").exists():
        write_skeleton(skeleton, options.seed)
    model = load_model(skeleton)
    prompt_builder = PromptBuilder(skeleton, read_config(skeleton))
    tokenizer = Qwen2TokenizerFast.from_pretrained(skeleton)
    words = spoken_words()
    learn_code2wav(model, words, options.work)
    learn_thinker(model, prompt_builder, tokenizer, options.work)
    learn_talker(model, Teacher(model, prompt_builder, tokenizer, words, skeleton), options.work)
    write_trained(model, options.out)


if __name__ == "__main__":
    main()
