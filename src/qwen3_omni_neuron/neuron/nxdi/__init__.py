"""The Neuron target of SDK 2.31: decoders on NxDI, other parts traced and compiled by NxD."""
