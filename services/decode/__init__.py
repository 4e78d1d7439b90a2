"""The decode worker: continues sealed logs token by token in continuous batches."""
