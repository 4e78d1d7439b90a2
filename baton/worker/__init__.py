"""What prefill and decode share: start-up, compute threads, prompts in chunks, output rules.

Never imports torch itself: the engine is handed in. Import the submodules.
"""
