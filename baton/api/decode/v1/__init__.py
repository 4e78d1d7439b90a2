"""Generated stubs of `baton.api.decode.v1`: written by `make gen`, never edited."""
