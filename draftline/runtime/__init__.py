"""Floor 5: the runtime. It knows sessions only through their protocol.

engine         a thread around the core; submit, cancel, statistics, close
core           one step: schedule -> forward -> commit -> emit
scheduler      who runs next, and on which blocks
step_builder   scheduled sequences -> the arrays of one forward
sequence       one request being served
limits         requests that can never be served, and why
text_stream    token ids -> text, stop words
request        what comes in, and what goes out
"""
