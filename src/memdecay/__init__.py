"""Region-aware KV-cache memory for LLM agents."""
