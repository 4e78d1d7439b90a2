"""The log of a kvstore: shared append-only segments of records.

`format` owns the bytes (with `fields` and `records`, which it builds on); the other modules write,
read, repair and compact them.
"""
