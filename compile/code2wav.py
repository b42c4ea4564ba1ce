"""Compile code2wav for a trn2: `python compile/code2wav.py --model CKPT --out DIR`."""

import sys

from qwen3_omni_neuron.cli.compile import compile_script

if __name__ == "__main__":
    sys.exit(compile_script("code2wav"))
