"""Translation between protobuf messages and the library's own dataclasses.

Owns the edge: the only library package that knows both sides. Never decides anything; a value that
cannot be translated is refused with a ServiceError naming the field.
"""
