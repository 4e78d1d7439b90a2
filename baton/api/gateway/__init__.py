"""Generated stubs of `baton.api.gateway`: written by `make gen`, never edited."""
