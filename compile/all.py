"""Compile every model: `python compile/all.py --model CKPT --out DIR`."""

import sys

from qwen3_omni_neuron.cli import main

if __name__ == "__main__":
    sys.exit(main(["compile", *sys.argv[1:]]))
