"""AWS Neuron: its targets nxdi and torchneuron, and the cores, graphs and engines they share."""
