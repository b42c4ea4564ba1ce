"""Compile the unrolled code predictor: `python compile/code_predictor.py --model CKPT --out DIR`.

One graph has all fifteen steps of a frame, with the KV cache inside.
"""

import sys

from qwen3_omni_neuron.cli.compile import compile_script

if __name__ == "__main__":
    sys.exit(compile_script("code_predictor"))
