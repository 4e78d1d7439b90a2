"""The prefill worker: runs prompts in chunks and commits their KV."""
