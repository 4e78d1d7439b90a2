"""Generated stubs of `baton.api.prefill`: written by `make gen`, never edited."""
