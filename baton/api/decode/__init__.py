"""Generated stubs of `baton.api.decode`: written by `make gen`, never edited."""
