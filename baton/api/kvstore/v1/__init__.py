"""Generated stubs of `baton.api.kvstore.v1`: written by `make gen`, never edited."""
