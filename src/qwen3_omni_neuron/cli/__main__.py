"""`python -m qwen3_omni_neuron.cli`."""

from qwen3_omni_neuron.cli import run

if __name__ == "__main__":
    run()
