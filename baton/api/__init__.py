"""Generated stubs of `baton.api`: written by `make gen`, never edited."""
