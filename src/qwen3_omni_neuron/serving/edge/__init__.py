"""The side that faces the network: sockets, protocols, and the limits of requests."""
