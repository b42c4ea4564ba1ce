"""The Neuron target of today's SDK: TorchNeuron with torch.compile, without NxDI."""
