"""Floor 5: the runtime. It knows sessions only through their protocol.

engine         a thread around the core; submit, cancel, statistics, close
core           one step: schedule -> draft -> verify -> accept -> commit -> fill -> emit
scheduler      who runs next, and on which blocks
drafting       all drafters' candidates, cut to what is allowed and what pays
drafters       what proposes: n-grams, Medusa heads, EAGLE heads and draft models
selection      select_for_speculation: how deep to draft, which nodes to verify; with
               cost_curve, uneven_cost, calibration, candidate_supply, draft_cost, probing, isotonic
step_builder   scheduled sequences and their trees -> the arrays of one forward
sequence       one request being served
limits         requests that can never be served, and why
text_stream    token ids -> text, stop words
request        what comes in, and what goes out
speculation_numbers  what was drafted, verified, accepted, emitted
"""
