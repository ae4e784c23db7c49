"""Train drafts for a target: prompts, its answers with their features, heads, and what they are worth."""
