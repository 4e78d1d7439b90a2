"""The five Baton services; each meets the others only over gRPC."""
