"""TorchNeuron, the way to the device through torch.compile: today's SDK, with nothing of NxDI."""
