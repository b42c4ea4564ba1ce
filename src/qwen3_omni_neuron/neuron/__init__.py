"""AWS Neuron: targets nxdi and torchneuron, and their shared cores, graphs and engines."""
