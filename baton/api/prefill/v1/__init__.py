"""Generated stubs of `baton.api.prefill.v1`: written by `make gen`, never edited."""
