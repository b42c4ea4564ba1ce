"""AWS Neuron: its entry in the table of targets, its engines, and nxdi, the way to the device."""
