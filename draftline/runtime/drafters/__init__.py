"""What proposes draft tokens, one file per way.

drafter   what the runtime asks of each
ngram     earlier text of the request itself
medusa    heads in the target's graph
graph     a graph with its own KV: EAGLE heads and draft models
"""
