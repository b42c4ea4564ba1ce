"""`qwen3-omni-neuron` and `python -m qwen3_omni_neuron`."""

import signal


def run() -> None:
    """Run the command line. Ctrl-C during its imports ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from qwen3_omni_neuron.cli import run as run_command_line

    run_command_line()


if __name__ == "__main__":
    run()
