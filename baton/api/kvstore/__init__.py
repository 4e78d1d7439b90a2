"""Generated stubs of `baton.api.kvstore`: written by `make gen`, never edited."""
