"""Generated stubs of `baton.api.common.v1`: written by `make gen`, never edited."""
