"""KV as data: layout, blobs, digests, labels, manifests, splice, convert, sizing.

Everything here is pure: bytes and numbers in, bytes and numbers out. No I/O, no torch, no protobuf.
docs/formats.md specifies every byte for readers in other languages.
Import the submodules; this package re-exports nothing.
"""
