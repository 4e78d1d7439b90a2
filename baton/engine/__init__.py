"""The engine: model configuration, weights, the torch forward over paged KV, and sampling.

This package file imports nothing, so that `baton.engine.config`, `baton.engine.gguf_meta`,
`baton.engine.sampling` and `baton.engine.finish` stay free of torch.
"""
