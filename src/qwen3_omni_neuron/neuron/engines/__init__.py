"""What the runtime asks of an engine, over decoders and parts on Neuron."""
