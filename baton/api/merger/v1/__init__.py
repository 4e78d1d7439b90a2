"""Generated stubs of `baton.api.merger.v1`: written by `make gen`, never edited."""
