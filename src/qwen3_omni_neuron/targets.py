"""The table of targets: the machines that a model can be compiled for and run on.

To add one, write its `compilation.target.Target` and put it into TARGETS; nothing else in the
package knows a target by its name.
"""

from qwen3_omni_neuron.compilation.target import Target
from qwen3_omni_neuron.cpu.target import CPU
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.neuron.target import NEURON
from qwen3_omni_neuron.neuron.torchneuron.target import TORCHNEURON

TARGETS: dict[str, Target] = {target.limits.target: target for target in (CPU, NEURON, TORCHNEURON)}
DEFAULT_TARGET = CPU.limits.target


def find_target(name: str) -> Target:
    """Return the target of this name. Raises OptionError where there is none."""
    if name not in TARGETS:
        raise OptionError(f"target is one of {', '.join(TARGETS)}, got {name!r}.")
    return TARGETS[name]
