"""`python -m qwen3_omni_neuron.cli`."""

import sys

from qwen3_omni_neuron.cli import main

if __name__ == "__main__":
    sys.exit(main())
