"""Baton: disaggregated LLM serving whose KV cache is data."""
