"""Text and tokens: tokenizer, chat template, detokenising and stop rules. Never imports torch."""
