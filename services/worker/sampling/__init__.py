"""From logits to tokens: what requests do to their logits, the draw itself, and how likely tokens were.

``drawing`` chooses for all rows at once; whatever else a request may ask for is an object of its own that goes along
with the request's step, so that requests that ask for nothing pay nothing.
"""
