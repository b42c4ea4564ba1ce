"""The Neuron target of SDK 2.33: TorchNeuron with torch.compile, without NxDI."""
