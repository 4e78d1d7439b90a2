"""The merger: splices behind gRPC. Stateless; never imports torch."""
