"""Quantised published checkpoints, read back to float32: a file per layout, and the table that recognises them.

``stated`` finds what a checkpoint says of its quantisation, ``recognition`` the layout that this is, ``layout`` puts
plain tensors in the place of the stored ones, ``parts``, ``stored`` and ``grid`` check, stream and multiply those of
one matrix, ``packing`` takes codes out of words. Tensors come out under Hugging Face's plain names, so that nothing
behind a reader knows of any layout.
"""
