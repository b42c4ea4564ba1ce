"""Compile the talker with norm capture: `python compile/talker.py --model CKPT --out DIR`.

Its graphs also return each row's hidden state after the last norm, for the code predictor.
"""

import sys

from qwen3_omni_neuron.cli.compile import compile_script

if __name__ == "__main__":
    sys.exit(compile_script("talker"))
