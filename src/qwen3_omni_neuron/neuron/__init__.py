"""AWS Neuron: its entry in the table of targets, the engines, and the room that runs them, nxdi."""
