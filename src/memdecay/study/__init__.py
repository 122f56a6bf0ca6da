"""The paper's study: episodes with planted facts, evicted and asked; its tables and figures."""
