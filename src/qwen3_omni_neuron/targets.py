"""The table of targets: the machines that a model can be compiled for and run on.

To add one, write its `compilation.target.Target` and put it into TARGETS; nothing else in the
package knows a target by its name.
"""

from typing import TYPE_CHECKING

from qwen3_omni_neuron.compilation.target import Target
from qwen3_omni_neuron.cpu.target import CPU
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.neuron.target import NEURON
from qwen3_omni_neuron.neuron.torchneuron.target import TORCHNEURON

if TYPE_CHECKING:
    from qwen3_omni_neuron.engines.sampling import DrawIds

TARGETS: dict[str, Target] = {target.limits.target: target for target in (CPU, NEURON, TORCHNEURON)}
DEFAULT_TARGET = CPU.limits.target


def find_target(name: str) -> Target:
    """Return the target of this name. Raises OptionError where there is none."""
    if name not in TARGETS:
        raise OptionError(f"target is one of {', '.join(TARGETS)}, got {name!r}.")
    return TARGETS[name]


def host_draws() -> "DrawIds":
    """Return what draws tokens on this host, whichever target computes their logits.

    It is the compiled library, or numpy where there is none.
    """
    from qwen3_omni_neuron.cpu.native.draws import NativeDraws
    from qwen3_omni_neuron.cpu.native.installed import find_library
    from qwen3_omni_neuron.engines.sampling import draw_ids

    library = find_library()
    return draw_ids if library is None else NativeDraws(library)
