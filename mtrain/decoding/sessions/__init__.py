"""Search on a GPU in static buffers, whose steps are replayed as CUDA graphs. It returns the same results as
`mtrain.decoding.search`.

    Question                                                            File
    Which session decodes a batch? Which ones are kept?                 sessions.py
    Which buffers and graphs has a session? When does a search end?     session.py
    What does a batch consist of, and how does it get to the device?    inputs.py
    What does a step of a search do with logits?                        steps.py
    How are logits computed?                                            ../../model/static_decoder.py

A step depends on no value that the host knows only later: all shapes are fixed, the position is in a tensor,
and sentences that are finished stay in the batch for a while. Symbols in shapes: see `mtrain.model`; T is the
number of positions in the buffers.
"""
