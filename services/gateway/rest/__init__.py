"""The OpenAI-shaped HTTP surface of the gateway."""
